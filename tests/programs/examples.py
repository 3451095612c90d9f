"""Run examples one after the other: ``examples.py FILE NAME...``; rank 0 writes what each has printed."""

import contextlib
import importlib
import io
import json
import sys
import warnings
from pathlib import Path

import mpiddp as dist

warnings.simplefilter("error")
printed = {}
for name in sys.argv[2:]:
    print("example", name, file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            importlib.import_module("mpiddp.examples." + name).main()
        except SystemExit as end:
            assert end.code == 2, end
            print("ends here")
            dist.destroy_process_group()
    assert not dist.is_initialized(), name
    printed[name] = text.getvalue()
dist.init_process_group()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(printed))
else:
    assert not any(text.replace("ends here", "").strip() for text in printed.values()), printed

"""``python -m mpiddp.examples``: the list of examples; with a name, that example."""

import difflib
import re
import runpy
import sys

from mpiddp import examples
from mpiddp.examples.printing import on_first_rank, print_once

if __name__ == "__main__":
    text = str(examples.__doc__).strip().replace("``", "")
    names = re.findall(r"^    (\w+) ", text, re.MULTILINE)
    if len(sys.argv) == 1:
        print_once(text)
    elif (name := sys.argv.pop(1)) in names:
        runpy.run_module(f"{examples.__name__}.{name}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, names, 1)
        cure = f"did you mean {near[0]}?" if near else "without a name this command lists them"
        sys.exit(f"there is no example {name!r}: {cure}" if on_first_rank() else 0)

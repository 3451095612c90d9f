"""Make mistakes in one job: ``mistakes.py JSON``, lists of words; print exit codes and output of all ranks."""

import contextlib
import io
import json
import os
import sys

import mpiddp as dist
from mpiddp import cli

cli._HEAD_START_S = 0.0  # for ranks that end
found = []
for words in json.loads(sys.argv[1]):
    variables = dict(word.split("=") for word in words if word.startswith("MPIDDP_"))
    arguments = words[len(variables) :]
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = cli.main(arguments)
    for name in variables:
        del os.environ[name]
    if dist.is_initialized():
        dist.destroy_process_group()
    found.append((code, stdout.getvalue(), stderr.getvalue()))
dist.init_process_group()
everybody = [None] * 3
dist.all_gather_object(everybody, found)
if dist.get_rank() == 0:
    print(json.dumps(everybody))

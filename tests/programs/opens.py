"""Run a program, and print each file that its Python opens to write: ``opens.py PROGRAM ARGS``."""

import os
import runpy
import sys
import tempfile
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def hear(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        # Shared memory and sockets are no disk.
        if flags & WRITES and not str(path).startswith(("/dev/", "/proc/")):
            print("opened to write:", path, flush=True)


tempfile.gettempdir()  # the first call tries folders by writing a word into each
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
sys.dont_write_bytecode = True
sys.addaudithook(hear)
runpy.run_path(sys.argv[0], run_name="__main__")

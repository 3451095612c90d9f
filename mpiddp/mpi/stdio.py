"""Printed output, which the launcher passes on. Imports the standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time

# For the launcher to read the output, and to pass it on: one told to end does neither.
_READ_S, _PASS_ON_S = 1.0, 0.05


def show_lines() -> None:
    """Write printed lines when complete, in one piece, where a launcher reads them.

    Python keeps 8 KiB for a pipe; with PYTHONUNBUFFERED=1 it writes each argument by itself, and ranks' lines mix.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # replaced by the program, or closed
            if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
                stream.reconfigure(line_buffering=True, write_through=False)


def deliver() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            _wait_until_read(stream.fileno())
    time.sleep(_PASS_ON_S)


def _wait_until_read(output: int) -> None:
    end = time.monotonic() + _READ_S
    is_pipe = stat.S_ISFIFO(os.fstat(output).st_mode)
    while is_pipe and any(fcntl.ioctl(output, termios.FIONREAD, bytes(4))) and time.monotonic() < end:
        time.sleep(0.005)

"""Delivery of printed output to the launcher, which passes it on. The module imports the standard library only."""

import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time

# A rank that ends its job waits until the launcher has read its output, for `_READ_S` at most, and then `_PASS_ON_S`
# for the launcher to pass it on. A launcher that is told to end does neither any more.
_READ_S, _PASS_ON_S = 1.0, 0.05


def show_lines() -> None:
    """Write each printed line as soon as it is complete, and in one piece, where a launcher reads the output.

    By default Python collects 8 KiB before it writes to a pipe. With PYTHONUNBUFFERED=1 it writes each argument of
    ``print`` by itself, and the lines of ranks mix.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the program may have closed the stream
            if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
                stream.reconfigure(line_buffering=True, write_through=False)


def deliver() -> None:
    """Write what was printed, and wait until the launcher has read it."""
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

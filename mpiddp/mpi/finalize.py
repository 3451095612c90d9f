"""The end of MPI, and functions that tell if MPI runs or has ended.

Only the process that started MPI finalises it, because mpi4py would hang in a forked child.
"""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from mpiddp import settings

finalizes = True
"""True if MPI is to be finalised at the end of the process; False after a rank has failed."""


def running() -> bool:
    library = _loaded()
    return library is not None and library.Is_initialized() and not library.Is_finalized()


def finalized() -> bool:
    library = _loaded()
    return library is not None and library.Is_finalized()


def _loaded() -> Any:
    """Return mpi4py's module; None if it is not imported, or if another thread is still importing it."""
    library = sys.modules.get("mpi4py.MPI")
    return library if hasattr(library, "Is_initialized") and hasattr(library, "Is_finalized") else None


def finalize(library: Any, pid: int) -> None:
    if os.getpid() == pid and finalizes and not library.Is_finalized():
        with exit_limit(settings.default_timeout_s()):
            library.Finalize()


@contextlib.contextmanager
def exit_limit(limit_s: float) -> Iterator[None]:
    """End the process, and print its stack, if the block lasts longer than ``limit_s``.

    The block may wait for a rank that is gone. At the end of a program a thread could not do this: Python starts no
    threads any more, and mpi4py's Finalize holds the interpreter's lock.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limit_s = min(limit_s, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()

"""mpi4py's ``MPI`` module, imported on first use, and the start and end of MPI.

Importing mpiddp does not start MPI, which aborts on many login nodes. The process that started it finalises it: mpi4py
would hang in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpiddp import settings
from mpiddp.errors import DistError

from . import processes, stdio

_FIRST_WORD_S = 3.0
"""For rank 0 to say why, before another rank aborts the job."""
_finalizes = True


class SetupError(DistError):
    """A launch that cannot work; rank 0 alone prints it."""


def _load() -> types.ModuleType:
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    try:
        rc: Any = importlib.import_module("mpi4py").rc
        wanted, rc.initialize = rc.initialize, False
        try:
            library = importlib.import_module("mpi4py.MPI")
        finally:
            rc.initialize = wanted
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"no MPI library could be loaded ({error}); on a cluster load the site's module (`module load openmpi`),"
            " on a laptop run `pip install 'mpiddp[mpich]'`"
        ) from error
    if wanted and not library.Is_initialized():
        _start(library, rc)
    return library


def _start(library: Any, rc: Any) -> None:
    launch = settings.launch()
    settings.prepare_survival()
    if launch is not None:
        _check_own(launch)
    name = " ".join(library.Get_library_version().split("\n")[0].replace("Version:", "").split())
    if launch is not None and "(Open MPI)" in launch.launcher and name.startswith("MPICH"):
        # Most builds of MPICH abort in MPI_Init then, silently.
        if launch.rank == 0:
            sys.stderr.write(
                f"Open MPI's mpirun started this job, but its library is {name} ({library.__file__}); if it ends now,"
                " start it with the mpirun that belongs to this library\n"
            )
            stdio.deliver()
        else:
            time.sleep(_FIRST_WORD_S)
    level = getattr(library, f"THREAD_{rc.thread_level.upper()}") if rc.threads else library.THREAD_SINGLE
    # mpi4py would hold the interpreter, and no thread could report the wait.
    with processes.watch_start():
        fault = ctypes.CDLL(library.__file__).MPI_Init_thread(None, None, int(level), ctypes.byref(ctypes.c_int()))
    if fault:
        raise SetupError(f"MPI could not be started: MPI_Init_thread of {name} returned {fault}")
    if rc.errors == "exception":
        for comm in (library.COMM_SELF, library.COMM_WORLD):
            comm.Set_errhandler(library.ERRORS_RETURN)
    if rc.finalize is not False:
        atexit.register(_finalize, library, os.getpid())


def _check_own(launch: settings.Launch) -> None:
    """Refuse MPI as the rank that started this process: MPICH fails, Open MPI's ranks crash."""
    rank_pid = settings.started_by_rank()
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        this, starter = multiprocessing.current_process(), multiprocessing.parent_process()
        if getattr(this, "_inheriting", False):
            fault = (
                "multiprocessing imports the program again in a process that it starts, and that import starts MPI: put"
                " what only ranks do under `if __name__ == '__main__':`"
            )
            if "PoolWorker" in this.name and rank_pid in _parents():
                _end_pool(fault, rank_pid)
            raise SetupError(fault)
        if starter is not None and rank_pid is None and launch.size > 1:
            refuse_spawned(launch, starter, this)
    if rank_pid is not None:
        raise SetupError(
            f"rank {launch.rank} of {launch.size} (process {rank_pid}) started this program, which has inherited the"
            " launcher's variables and would be that rank a second time; start it, alone or by an mpirun of its own,"
            " with `env=mpiddp.settings.outside_of_jobs()`"
        )


def refuse_spawned(launch: settings.Launch, rank: Any, child: Any) -> NoReturn:
    """End the rank that spawned this process: the job would hang. Rank 0's first child prints."""
    if launch.rank != 0 or child._identity[-1:] != (1,):
        rank.join(_FIRST_WORD_S)
    if rank.is_alive():
        sys.stderr.write(
            f"SetupError: rank {launch.rank} of {launch.size} (process {rank.pid}) started this process with"
            f" multiprocessing, as if it had to start ranks; {launch.launcher} has started all {launch.size} of them"
            " already: delete the spawn (multiprocessing.Process, mp.spawn, a Pool), and call its function directly in"
            " every process\n"
        )
        stdio.deliver()
        os.kill(rank.pid, signal.SIGKILL)
    os._exit(1)


def _parents() -> list[int]:
    """Return two generations: a fork server may stand between a Pool and its workers."""
    found = [os.getppid()]
    with contextlib.suppress(OSError):  # macOS has no such file
        found.append(int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1]))
    return found


def _end_pool(fault: str, rank_pid: int) -> NoReturn:
    """End the job: a Pool replaces its workers without end."""
    sys.stderr.write(f"SetupError: {fault}; the pool would start its workers again for ever, so the job ends here\n")
    stdio.deliver()
    os.kill(rank_pid, signal.SIGKILL)
    os._exit(1)


def never_finalize() -> None:
    global _finalizes
    _finalizes = False


def running() -> bool:
    library = _loaded()
    return library is not None and library.Is_initialized() and not library.Is_finalized()


def finalized() -> bool:
    library = _loaded()
    return library is not None and library.Is_finalized()


def _loaded() -> Any:
    """Return mpi4py's module, or None also while another thread still imports it."""
    library = sys.modules.get("mpi4py.MPI")
    return library if hasattr(library, "Is_initialized") and hasattr(library, "Is_finalized") else None


def _finalize(library: Any, pid: int) -> None:
    if os.getpid() == pid and _finalizes and not library.Is_finalized():
        with exit_limit(settings.default_timeout_s()):
            library.Finalize()


@contextlib.contextmanager
def exit_limit(limit_s: float) -> Iterator[None]:
    """End the process, and print its stack, if the block lasts longer, as it waits for a rank that is gone.

    For the end of the program: no Python thread can be started any more, and mpi4py's Finalize holds the interpreter.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limit_s = min(limit_s, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _Library(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            library = _load()
            self.__dict__.update((key, value) for key, value in vars(library).items() if not key.startswith("__"))
            self.__file__ = library.__file__
            # A plain module is five times faster.
            self.__class__ = types.ModuleType
            return getattr(library, name)

    MPI = _Library("mpi4py.MPI")

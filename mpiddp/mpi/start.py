"""The start of MPI. A thread looks meanwhile if a rank of this host has ended before its MPI has started.

The other ranks would wait for such a rank in MPI_Init for ever, because neither Hydra nor Open MPI ends the job if a
rank exits before MPI_Init.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from mpiddp import launchers
from mpiddp.errors import SetupError

from . import processes, stdio
from .child_processes import refuse_children
from .finalize import finalize
from .library import short_name

_HYDRA = "hydra_pmi_proxy"
_STARTERS = ("mpirun", "mpiexec", "prterun", "orterun", "prted", "orted", _HYDRA)
_LOOK_S, _LOOK_RANK_S = 0.25, 0.01
"""The least time between two looks at the ranks of this host, and the least time for each of these ranks. Every rank
looks at all of them, so many ranks look less often."""
_MISSING_S = 2.0
"""How long a rank may be missing, because launchers start one rank after the other."""
_END_S = 3.0
"""How long the process that reports the missing rank waits for mpirun to end it, before it exits by itself. The other
processes wait twice as long."""
_FIRST_WORD_S = 3.0
"""How long ranks other than 0 wait before MPI_Init if the library does not fit the launcher. MPI_Init may abort the job
then, and rank 0 is to print the reason first."""


def start(library: Any, rc: Any) -> None:
    launch = launchers.launch()
    launchers.prepare_survival()
    if launch is not None:
        refuse_children(launch)
    name = short_name(library.Get_library_version())
    if launch is not None and name.startswith(launch.launcher.ends_libraries):
        if launch.rank == 0:
            sys.stderr.write(
                f"{launch.launcher.name} started this job, but its library is {name} ({library.__file__}); if it ends"
                " now, start it with the mpirun that belongs to this library\n"
            )
            stdio.deliver()
        else:
            time.sleep(_FIRST_WORD_S)
    level = getattr(library, f"THREAD_{rc.thread_level.upper()}") if rc.threads else library.THREAD_SINGLE
    # mpi4py would hold the interpreter's lock during MPI_Init, so that no thread could report the wait.
    with _watched():
        fault = ctypes.CDLL(library.__file__).MPI_Init_thread(None, None, int(level), ctypes.byref(ctypes.c_int()))
    if fault:
        raise SetupError(f"MPI could not be started: MPI_Init_thread of {name} returned {fault}")
    if rc.errors == "exception":
        for comm in (library.COMM_SELF, library.COMM_WORLD):
            comm.Set_errhandler(library.ERRORS_RETURN)
    if rc.finalize is not False:
        atexit.register(finalize, library, os.getpid())


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """End the job if a rank of this host ends during the block, or has ended before.

    Ranks can be watched if mpirun or its daemon has started several on this host; under srun nobody watches.
    """
    over = threading.Event()
    expected = launchers.local_ranks() or 0
    if expected > 1 and processes.name(os.getppid()) in _STARTERS:
        threading.Thread(target=_watch, args=(expected, over), name="mpiddp-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(expected: int, over: threading.Event) -> None:
    starter, before, since = os.getppid(), dict[str, int](), time.monotonic()
    look_s = max(_LOOK_S, _LOOK_RANK_S * expected)
    while not over.wait(look_s):
        ranks = processes.started_ranks(starter)
        if ranks != before or not ranks or len(ranks) >= expected:
            before, since = ranks, time.monotonic()
        elif time.monotonic() - since > _MISSING_S:
            if os.getpid() == min(map(int, ranks)):
                sys.stderr.write(
                    f"{_missing([*ranks.values()], expected)} ended before MPI had started, and the others wait in"
                    " MPI_Init: the job ends; every rank has to call init_process_group, so look for an error, an exit"
                    " or a return before it\n"
                )
                stdio.deliver()
                # Meanwhile the other ranks' threads see it, too. Only the process with the lowest id prints.
                time.sleep(2 * look_s)
                if launchers.launcher_survives():
                    os.kill(starter, signal.SIGTERM)
                    time.sleep(_END_S)
                elif processes.name(starter) == _HYDRA:
                    os.kill(os.getpid(), signal.SIGKILL)  # before MPI has started, Hydra ignores exits, but no signals
            else:
                time.sleep(2 * _END_S)
            os._exit(1)


def _missing(running: list[int], expected: int) -> str:
    launch = launchers.launch()
    # The missing ranks can be named only if this host has all ranks of the job, and all numbers are known.
    if launch is None or launch.size != expected or processes.UNKNOWN in running:
        return f"{expected - len(running)} of the {expected} ranks on host {socket.gethostname()}"
    ended = sorted(set(range(expected)).difference(running))
    return f"rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))} of {expected}"

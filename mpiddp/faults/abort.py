"""The end of a job at once: the reason is printed, and every rank ends.

`import mpiddp` imports this module, which therefore loads neither NumPy nor MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from mpiddp import launchers, rank_process
from mpiddp.errors import EXIT_TIMEOUT
from mpiddp.mpi import processes, stdio
from mpiddp.mpi.finalize import exit_limit, running
from mpiddp.mpi.lazy import MPI

from . import mpirun

if TYPE_CHECKING:
    from .reports import Reports  # this import is for type checkers only, because it loads NumPy

# Before a rank prints, it waits for `_TURN_S` times its number, but at most `_LAST_TURN` times. So if all ranks fail in
# the same way, the lowest rank prints first, and mostly ends the job before the turns of the others.
_TURN_S, _LAST_TURN = 0.2, 8
_POLL_S = 0.01
# The time after which the process ends by itself, because MPI_Abort may have no effect.
_ABORT_S = 5.0
_PMI_S, _PMI_BYTES = 1.0, 256
ANSWER_S = 1.5
"""Time for the other ranks to tell what they do, before this rank ends the job."""


class ThisRank(NamedTuple):
    """The numbers of this process in its job."""

    rank: int = 0
    size: int = 1
    world_rank: int = 0
    """The rank in MPI's world."""
    alone: bool = True
    """True if MPI's world has no other rank."""


this_rank = ThisRank()
"""Until the job starts, these are the numbers that the launcher has announced, or those of a process without one."""
reports: Reports | None = None
"""The object that asks the other ranks what they do; None before the job has started."""
_ending = threading.Lock()


def wait(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Wait for so many seconds, or until a condition is true, and answer the other ranks meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        if reports is not None and running():
            with contextlib.suppress(MPI.Exception):
                reports.liveness.progress()
        time.sleep(_POLL_S)


def set_this_rank(comm: MPI.Intracomm) -> None:
    """Take the numbers of this process from the communicator of its job."""
    global this_rank
    world = MPI.COMM_WORLD
    this_rank = ThisRank(comm.rank, comm.size, world.rank, world.size == 1)
    rank_process.claim_rank()


def label() -> str:
    outer = f" ({this_rank.world_rank} of the world)" if this_rank.world_rank != this_rank.rank else ""
    return f"[rank {this_rank.rank}/{this_rank.size}{outer} {socket.gethostname()}]"


def say(text: str) -> None:
    write(labelled(text))


def write(text: str) -> None:
    stream = sys.__stderr__ or sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or a broken pipe
        stream.write(text)
        stream.flush()


def labelled(text: str) -> str:
    return "".join(f"{label()} {line}\n" for line in text.splitlines())


def ends() -> bool:
    return _ending.locked()


def abort(text: str | Callable[[], str], code: int, dumps: str = "") -> NoReturn:
    """Print ``text`` when it is this rank's turn, and end the job.

    If ``dumps`` is not empty, all ranks that answer write their flight recorders to files before the job ends.
    ``dumps`` is the reason that these files give.
    """
    _ending.acquire()  # the lock is never released, because the first reason counts
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if reports is not None and running():
        reports.liveness.announce_end()
    wait(_TURN_S * min(this_rank.rank, _LAST_TURN))
    try:
        say(text if isinstance(text, str) else text())
        if dumps and reports is not None:
            say(reports.collect(dumps))
    except Exception:  # this thread has to end the job, because no other one can any more
        say(traceback.format_exc())
    stdio.deliver()
    if running() and MPI.COMM_WORLD.size > 1:
        # mpi4py holds the interpreter's lock in Abort. `exit_limit` ends the process without that lock.
        with exit_limit(_ABORT_S):
            processes.remove_shared_files(os.getpid())
            mpirun.end_after_this_process(() if reports is None else reports.liveness.world.hosts)
            MPI.COMM_WORLD.Abort(code)
    launch = launchers.launch()
    if not running() and launch is not None and not launch.launcher.ends_with_a_rank:
        _abort_by_pmi(code)
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _abort_by_pmi(code: int) -> None:
    """Ask Hydra by PMI to end the job; return if it does not."""
    descriptor = os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(descriptor))) as hydra:
        hydra.settimeout(_PMI_S)
        hydra.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
        if b"rc=0" in hydra.recv(_PMI_BYTES):
            hydra.sendall(b"cmd=abort exitcode=%d\n" % code)
            time.sleep(_PMI_S)


@contextlib.contextmanager
def time_limit(timeout_s: float, what: str) -> Iterator[None]:
    def report() -> str:
        return f"{unmet(what, timeout_s)}{absent()}{_states()}"

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), abort, (report, EXIT_TIMEOUT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def unmet(what: str, timeout_s: float) -> str:
    waits = "it waits for ranks that have not called it, and every rank has to"
    return f"{what} did not finish in {timeout_s:g} s: {waits}"


absent: Callable[[], str] = str
"""The function that tells which ranks have not come. `meeting` sets it while the ranks meet for the first time."""


def _states() -> str:
    """Return a text on what the other ranks do; "" if the ranks have not met, or this thread must not call MPI."""
    if reports is not None and running() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        with contextlib.suppress(MPI.Exception):  # MPI raises it if a rank has failed
            return reports.explain(None, ANSWER_S)
    return ""

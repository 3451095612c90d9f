"""The end of a job: together when all goes well, at once with the reason when a rank fails.

An ended program answers the others until all have ended (`Shutdown`); then MPI is finalised.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from mpiddp import settings
from mpiddp.errors import (
    EXIT_INTERRUPTED,
    EXIT_MISMATCH,
    EXIT_TIMEOUT,
    DistError,
    DistTimeoutError,
    MismatchError,
    RankFailedError,
    SetupError,
)
from mpiddp.mpi import processes, requests, stdio
from mpiddp.mpi.finalize import exit_limit, finalized, running
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.operation import Operation

from . import activity, marker, mpirun
from .neighbour import Neighbour

if TYPE_CHECKING:
    from .job import Job  # types only: `import mpiddp` imports this module, and is to load no NumPy
    from .reports import Reports

# When all ranks fail alike, the first to speak ends the job.
_TURN_S, _LAST_TURN = 0.2, 8
_POLL_S = 0.01
# MPI_Abort may not get through.
_ABORT_S = 5.0
_PMI_S, _PMI_BYTES = 1.0, 256
# For rank 0 to print a set-up error and end the job.
_SILENT_S = 5.0
# For the others' activities after a Ctrl-C.
_ANSWER_S = 1.5
# For the next unfinished operation when every program has ended.
_REST_S = 5.0

_rank, _size = 0, 1
_owner_pid = 0
_ending = threading.Lock()
_reports: Reports | None = None
_limit_s: float | None = None


def install() -> None:
    """End the job at a rank's uncaught exception; programs that a rank starts keep Python's hook."""
    global _rank, _size, _owner_pid
    if _owner_pid:
        return
    _owner_pid = os.getpid()
    announced = settings.launch()
    if announced is not None and settings.started_by_rank() is None:
        _rank, _size = announced.rank, announced.size
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _size == 1 or os.getpid() != _owner_pid or finalized():
            previous(kind, error, trace)
        elif isinstance(error, SetupError):
            if _rank != 0:
                time.sleep(_SILENT_S)
                os._exit(1)
            abort(f"{kind.__name__}: {error}", 1)
        elif issubclass(kind, KeyboardInterrupt):
            lines, operation = activity.unwind(trace)
            if _reports is not None:
                _reports.liveness.interrupted = True
            abort(lambda: interruption(lines, operation), EXIT_INTERRUPTED)
        else:
            activity.unwind(trace)
            text = "".join(traceback.format_exception(kind, error, trace))
            abort(lambda: text + _others(error) + _recorded(error), _exit_code(error))

    sys.excepthook = hook


def _others(error: BaseException) -> str:
    if not isinstance(error, MismatchError) or _reports is None:
        return ""
    ranks = [rank for rank in error.ranks if rank != _rank]
    return f"{_reports.doing(ranks, _ANSWER_S)}\n" if ranks else ""


def _recorded(error: BaseException) -> str:
    """Let all ranks dump after an error of communication, or any where dumps are asked for."""
    of_all = isinstance(error, (DistTimeoutError, MismatchError, RankFailedError))
    return dumped("", type(error).__name__) if of_all or settings.flight_recorder() else ""


def _exit_code(error: BaseException) -> int:
    codes = ((DistTimeoutError, EXIT_TIMEOUT), (MismatchError, EXIT_MISMATCH))
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def report_by(reports: Reports) -> None:
    global _reports
    _reports = reports


def dumped(text: str, reason: str) -> str:
    return text if _reports is None else _reports.with_dumps(text, reason)


def interruption(lines: str, operation: Operation | None) -> str:
    """Return the report of a Ctrl-C, after that of a lower interrupted rank."""
    if _reports is None or _size == 1:
        return report(lines, operation, "")
    others = _reports.explain(operation, _ANSWER_S)
    until = time.monotonic() + _SILENT_S
    while _reports.liveness.interrupted_before() and time.monotonic() < until:
        _progress()
        time.sleep(_POLL_S)
    return report(lines, operation, others)


def report(lines: str, operation: Operation | None, others: str) -> str:
    where = "" if operation is None else f" in {operation}"
    unmatched = "" if operation is None else operation.members.monitor.unmatched()
    return f"{lines}interrupted (Ctrl-C){where}{others}" + (f"\n  {unmatched}" if unmatched else "")


def _progress() -> None:
    if _reports is not None and running():
        with contextlib.suppress(MPI.Exception):
            _reports.liveness.progress()


def set_limit(limit_s: float) -> None:
    """Set the time limit of the waits at the end of the program."""
    global _limit_s
    _limit_s = limit_s


def set_rank(rank: int, size: int) -> None:
    """Take MPI's rank and size, not the launcher's."""
    global _rank, _size
    _rank, _size = rank, size
    settings.claim_rank()


def label() -> str:
    return f"[rank {_rank}/{_size} {socket.gethostname()}]"


def say(text: str) -> None:
    write(labelled(text))


def write(text: str) -> None:
    stream = sys.__stderr__ or sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or a broken pipe
        stream.write(text)
        stream.flush()


def labelled(text: str) -> str:
    return "".join(f"{label()} {line}\n" for line in text.splitlines())


def ends() -> bool:
    return _ending.locked()


def abort(text: str | Callable[[], str], code: int) -> NoReturn:
    """Print ``text`` at this rank's turn, and end the job."""
    _ending.acquire()  # for good: the first reason counts
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _reports is not None and running():
        _reports.liveness.announce_end()
    turn = time.monotonic() + _TURN_S * min(_rank, _LAST_TURN)
    while time.monotonic() < turn:
        _progress()
        time.sleep(_POLL_S)
    try:
        say(text if isinstance(text, str) else text())
    except Exception:  # no other thread can end the job any more
        say(traceback.format_exc())
    stdio.deliver()
    if running() and MPI.COMM_WORLD.size > 1:
        # mpi4py holds the interpreter while it aborts: the backstop must not need it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback_later(_ABORT_S, exit=True, file=sys.__stderr__ or sys.stderr)
        processes.remove_shared_files(os.getpid())
        mpirun.end_after_this_process(() if _reports is None else _reports.liveness.world.hosts)
        MPI.COMM_WORLD.Abort(code)
    launch = settings.launch()
    if not running() and launch is not None and "Hydra" in launch.launcher:
        # Before MPI starts, Hydra ends the job for a killed rank, but not for one that exits.
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
        waits = "it waits for ranks that have not called it, and every rank has to"
        return f"{what} did not finish in {timeout_s:g} s: {waits}{_states()}"

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), abort, (report, EXIT_TIMEOUT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _states() -> str:
    """Return what the other ranks do, as far as they have met and this thread may ask."""
    if _reports is not None and running() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        with contextlib.suppress(MPI.Exception):  # a rank has failed
            return _reports.explain(None, _ANSWER_S)
    return ""


class Shutdown:
    """The end of a program, at exit or in MPI.Finalize; ``stop`` follows the end of all."""

    def __init__(self) -> None:
        self.job: Job
        self.stop: Callable[[], object]
        self._ended = False
        # MPI_Finalize first deletes COMM_SELF's attributes, while MPI still works.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._end_groups())
        MPI.COMM_SELF.Set_attr(key, self)

    def __call__(self) -> None:
        if self._ended or os.getpid() != _owner_pid or not running():
            return
        self._ended = True
        try:
            limit_s = settings.default_timeout_s() if _limit_s is None else _limit_s
            while not self._wait(limit_s):
                with exit_limit(limit_s):
                    self.job = self.job.survivors()
                set_rank(self.job.world.rank, self.job.world.size)
        except KeyboardInterrupt:
            self.job.liveness.interrupted = True
            abort(lambda: interruption("its program has ended; ", None), EXIT_INTERRUPTED)
        marker.end(self.job.world.rank)
        self.stop()

    def _end_groups(self) -> None:
        """Let later calls raise, as a destructor's: MPI would end the process."""
        self()
        for link in self.job.liveness.links():
            link.abort(DistError("MPI has been finalised"))

    def _wait(self, limit_s: float) -> bool:
        """Return False if a rank failed meanwhile."""
        try:
            self._wait_for_all(limit_s)
            # Some may have passed the barrier, and would be waited for in MPI_Finalize.
            with exit_limit(limit_s):
                self.job.failures.agree()
        except Exception as error:
            if not self.job.failures.caused(error):
                raise
            return False
        return True

    def _wait_for_all(self, limit_s: float) -> None:
        liveness, neighbour = self.job.liveness, Neighbour(self.job, limit_s)
        liveness.exited = True
        barrier, total = self.job.distant.begin_end(self.job.world.comm)
        pause_s, deadline, pending = 1e-5, 0.0, -1
        while True:
            # Poll both: other ranks may wait for what this one submitted.
            together, finished = barrier.Test(), requests.finished()
            if together and finished:
                break
            if not together or requests.pending != pending:
                deadline, pending = time.monotonic() + _REST_S, requests.pending
            if time.monotonic() > deadline:
                say(
                    "the program ended with asynchronous operations that no other rank takes part in: an isend that"
                    " nobody received, or a collective that only some ranks submitted; wait() for every Work"
                )
                break
            liveness.progress()
            if silence := neighbour.silence():
                abort(lambda: dumped(f"its program has ended, and {silence}", "a missing rank"), EXIT_TIMEOUT)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05 if finished else 0.001)
        different = self.job.distant.settle(self.job.world.comm) if total[0] else None
        unheard = (link.monitor.unheard() for link in liveness.links())
        error = different or next(filter(None, unheard), None)
        if error is not None:
            abort(f"{type(error).__name__}: {error}", EXIT_MISMATCH)

"""How a job ends: together when all goes well, at once and with the reason when one rank fails.

An uncaught exception ends the whole job with that rank's traceback (`install`). A program that has come to its end
waits for the others (`leave`) before MPI is finalised, answering those who ask whether it is still there.
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
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from mpiddp import settings
from mpiddp.errors import EXIT_MISMATCH, EXIT_TIMEOUT, DistTimeoutError, MismatchError
from mpiddp.mpi import stdio, work
from mpiddp.mpi.lazy import MPI, SetupError, finalized, running

if TYPE_CHECKING:
    from mpiddp.mpi.world import World

on_exit: list[Callable[[], bool]] = []
"""What goes on while a rank waits for the others at its end: each is polled and answers whether it has finished."""

# When all ranks fail alike, the first to speak ends the job before the others have their turn.
_TURN_S, _LAST_TURN = 0.2, 8
# If MPI_Abort cannot get through, the process ends without it after this time.
_ABORT_S = 5.0
# A rank other than 0 keeps silent about a set-up error, and waits so long for rank 0 to print it and end the job.
_SILENT_S = 5.0
# When every program has ended, unfinished operations get this long until the next one finishes.
_REST_S = 5.0

_rank, _size = 0, 1
_owner_pid = 0
_ending = threading.Lock()


def install() -> None:
    """Let an uncaught exception on one rank of several end the job; done once, before MPI starts.

    That of a program which a rank has started is a matter between the two.
    """
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
            abort("interrupted (Ctrl-C)", 130)
        else:
            abort("".join(traceback.format_exception(kind, error, trace)), _exit_code(error))

    sys.excepthook = hook


def _exit_code(error: BaseException) -> int:
    codes = ((DistTimeoutError, EXIT_TIMEOUT), (MismatchError, EXIT_MISMATCH))
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def know(rank: int, size: int) -> None:
    """Replace what the launcher announced by what MPI says, which makes this process the rank that was announced."""
    global _rank, _size
    _rank, _size = rank, size
    settings.claim_rank()


def label() -> str:
    """Return ``[rank r/N host]``, by which a line of output names its process."""
    return f"[rank {_rank}/{_size} {socket.gethostname()}]"


def say(text: str) -> None:
    """Print ``text`` on stderr under this rank's name, in one piece."""
    stream = sys.__stderr__ or sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or a broken pipe
        stream.write("".join(f"{label()} {line}\n" for line in text.splitlines()))
        stream.flush()


def abort(text: str | Callable[[], str], code: int) -> NoReturn:
    """Print ``text`` under this rank's name, in one piece, and end the whole job with the exit code ``code``.

    Parameters
    ----------
    text : str or callable
        A callable is asked when it is this rank's turn to speak.
    code : int
        The exit code.
    """
    _ending.acquire()  # for good: the first reason counts
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    time.sleep(_TURN_S * min(_rank, _LAST_TURN))
    try:
        say(text if isinstance(text, str) else text())
    except Exception:  # nobody else may end the job any more
        say(traceback.format_exc())
    stdio.deliver()
    if running() and MPI.COMM_WORLD.size > 1:
        # mpi4py holds the interpreter while it aborts, so the backstop must not need it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback_later(_ABORT_S, exit=True, file=sys.__stderr__ or sys.stderr)
        MPI.COMM_WORLD.Abort(code)
    launch = settings.launch()
    if not running() and launch is not None and "Hydra" in launch.launcher:
        # Hydra lets the others wait for ever for a rank that exits before MPI starts, but not for one that is killed.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


class Leaving:
    """The end of a program that has worked with a world: at exit, or when it calls MPI.Finalize itself.

    Parameters
    ----------
    survivors : callable
        Returns the world of those that live of the world given, after some have died.

    Attributes
    ----------
    world : World
        The running world.
    stop : callable
        Called when every rank has left.
    """

    def __init__(self, survivors: Callable[[World], World]) -> None:
        self.world: World
        self.stop: Callable[[], object]
        self._survivors = survivors
        self._left = False
        # MPI_Finalize begins with the attributes of COMM_SELF, while MPI can still be used.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self())
        MPI.COMM_SELF.Set_attr(key, self)

    def __call__(self) -> None:
        """Wait until every rank has come to its end."""
        if self._left or os.getpid() != _owner_pid or not running():
            return
        self._left = True
        try:
            while not self._wait():
                self.world = self._survivors(self.world)
        except KeyboardInterrupt:
            abort("interrupted (Ctrl-C) at its end, where it waited for the other ranks", 130)
        self.stop()

    def _wait(self) -> bool:
        """Wait, and tell whether nobody has died meanwhile: those that live may go on without, with this rank."""
        try:
            self._wait_for_all(self.world)
            # Some may have come through the barrier and others not, who would wait for those in MPI_Finalize.
            self.world.deaths.expect_none()
        except Exception:
            if not self.world.deaths.happened():
                raise
            return False
        return True

    def _wait_for_all(self, world: World) -> None:
        presence = world.presence
        presence.ended = True
        everybody_left = world.comm.Ibarrier()
        pause_s, deadline, unfinished = 1e-5, 0.0, -1
        while True:
            # Both are asked every time: what was submitted and not waited for may be what the others wait for.
            together, finished = everybody_left.Test(), [each() for each in on_exit]
            if together and all(finished):
                return
            if not together or work.unfinished != unfinished:
                deadline, unfinished = time.monotonic() + _REST_S, work.unfinished
            if time.monotonic() > deadline:
                say(
                    "the program ended with asynchronous operations that no other rank takes part in: an isend that"
                    " nobody received, or a collective that only some ranks submitted; wait() for every Work"
                )
                return
            presence.pump()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05 if all(finished) else 0.001)

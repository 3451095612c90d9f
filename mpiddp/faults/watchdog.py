"""The watchdog: a thread that ends the job when this rank waits for what can no longer come, and says why.

It looks twice a second, answers the questions of other ranks, and notices by its number that the process is still in
the same wait: the program pays nothing for being watched, and no array lives longer for it. It also sees a Ctrl-C that
Python cannot, because it waits in MPI. It needs MPI_THREAD_MULTIPLE; where the library does not offer that, nobody
watches, and ``info`` says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from mpiddp.errors import EXIT_MISMATCH, EXIT_TIMEOUT, MismatchError
from mpiddp.mpi import operation
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.operation import Operation

from .failures import Deaths
from .liveness import Presence

LOOK_S = 0.5
# A rank that left is held against the job only when another has waited this long for it.
PATIENCE_S = 3.0
# Python handles a Ctrl-C within this time, unless it waits in MPI.
INTERRUPT_S = 1.0
_WRITTEN_S = 0.01
_EXIT_INTERRUPTED = 130
_STOP = b"\0"


class Abort(Protocol):
    """Ends the job with a text and an exit code."""

    def __call__(self, text: str | Callable[[], str], code: int) -> None:
        """Print ``text`` and end the job."""


class Watchdog:
    """Watches over the waits of this process.

    Parameters
    ----------
    presence : Presence
        How the other ranks are asked.
    deaths : Deaths
        Which of them are known to be dead: then this one has nothing to watch any more.
    abort : callable
        Ends the job: takes the text to print, or what returns it, and the exit code.
    """

    def __init__(self, presence: Presence, deaths: Deaths, abort: Abort) -> None:
        self._presence = presence
        self._deaths = deaths
        self._abort = abort
        # The wait that was seen last (see `Operation.identity`), since when, and when others were asked about it.
        self._seen: tuple[object, ...] | None = None
        self._since = self._asked = 0.0
        self._interrupted: tuple[object, ...] | None = None
        self._interrupted_at = 0.0
        # Python's C-level signal handler writes the numbers of signals here, whatever the main thread does.
        self._signals, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            others = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if others != -1:
                signal.set_wakeup_fd(others)  # an event loop needs it
            # The pipe is the parent's: a signal for a forked child is none for this process.
            os.register_at_fork(after_in_child=self._let_go)
        self._thread = threading.Thread(target=self._watch, name="mpiddp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before MPI is finalised."""
        self._let_go()
        os.write(self._writer, _STOP)
        self._thread.join()
        for end in (self._signals, self._writer):
            os.close(end)

    def _let_go(self) -> None:
        """Hear of no more signals."""
        with contextlib.suppress(ValueError):  # in another thread than the main one
            heard = signal.set_wakeup_fd(-1)
            if heard not in (-1, self._writer):
                signal.set_wakeup_fd(heard)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals], [], [], LOOK_S)
            numbers = os.read(self._signals, 64) if ready else b""
            if _STOP in numbers:
                return
            try:
                self._presence.pump()
                self._look(signal.SIGINT in numbers)
            except MPI.Exception:
                if not self._deaths.happened():
                    raise
                self._deaths.spread()
                return

    def _look(self, interrupted: bool) -> None:
        """Look at what the process waits in; nothing of it is kept when this returns."""
        current, now = operation.running, time.monotonic()
        identity = None if current is None else current.identity
        # A wait that was seen before the signal has not seen it; one that was not may have begun in answer to it.
        if interrupted and identity == self._seen and _python_handles_interrupts():
            self._interrupted, self._interrupted_at = identity, now
        if current is None or identity != self._seen:
            self._seen, self._since, self._asked = identity, now, 0.0
            return
        waited_s = now - self._since
        if identity == self._interrupted and now - self._interrupted_at > INTERRUPT_S:
            self._abort(f"interrupted (Ctrl-C) in {current}", _EXIT_INTERRUPTED)
        # Who waits in slots looks as well, and raises.
        if not current.limited and not current.link.lingers and _disagreement(current):
            # A call that another rank was writing just then is whole now.
            time.sleep(_WRITTEN_S)
            text = _disagreement(current)
            if text and current is operation.running:
                self._abort(f"{_stack()}{text}", EXIT_MISMATCH)
        if waited_s > PATIENCE_S and self._presence.departed(current) and current is operation.running:
            self._abort(functools.partial(self._desertion, current), 1)
        if not current.limited and waited_s > current.link.timeout_s:
            self._abort(functools.partial(self._timeout, current), EXIT_TIMEOUT)
        # The first question leaves before patience ends, so that its answer is there when it is wanted.
        if waited_s > PATIENCE_S - 3 * LOOK_S and now - self._asked > PATIENCE_S:
            self._presence.ask(current, self._presence.suspects(current))
            self._asked = now

    def _desertion(self, waiting: Operation) -> str:
        self._presence.explain(waiting)  # asks everybody, not the suspects only
        gone = self._presence.departed(waiting)
        who = (
            f"program of rank {gone[0]} has"
            if len(gone) == 1
            else f"programs of ranks {', '.join(map(str, gone))} have"
        )
        return (
            f"{_stack()}{waiting} cannot end: the {who} ended without taking part in it. Every rank has"
            " to call the same operations in the same order; look for a loop, an early return or a sys.exit that only"
            " some ranks reach (uneven inputs: DistributedDataParallel.join)"
        )

    def _timeout(self, waiting: Operation) -> str:
        reason = self._presence.explain(waiting)
        return f"{_stack()}{waiting} did not finish in {waiting.link.timeout_s:g} s: {reason}"


def _disagreement(waiting: Operation) -> str:
    """Return what is wrong where ranks wait in different operations for each other; nothing where all is well."""
    calls = waiting.link.board
    if calls is None:
        return ""
    try:
        for sequence in tuple(calls.open):
            calls.compare(sequence)
    except MismatchError as error:
        return str(error)
    return ""


def _python_handles_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _stack() -> str:
    """Return where the program waits, as in a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame) if frame else []
    return "".join(["Waiting (most recent call last):\n", *lines])

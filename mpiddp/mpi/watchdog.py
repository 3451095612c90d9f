"""The watchdog: a thread that ends the job when this rank waits for what can no longer come, and says why.

It looks twice a second, answers the questions of other ranks, and notices by identity that the process is still in the
same wait: the program pays nothing for being watched. It needs MPI_THREAD_MULTIPLE; where the library does not offer
that, nobody watches, and ``info`` says so.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from typing import Protocol

from mpiddp.errors import EXIT_TIMEOUT

from . import operation
from .operation import Operation
from .presence import Presence

LOOK_S = 0.5
# A rank that left is held against the job only when another has waited this long for it.
PATIENCE_S = 3.0


class Abort(Protocol):
    """Ends the job with a text and an exit code."""

    def __call__(self, text: str, code: int) -> None:
        """Print ``text`` and end the job."""


class Watchdog:
    """Watches over the waits of this process.

    Parameters
    ----------
    presence : Presence
        How the other ranks are asked.
    abort : callable
        Ends the job: takes the text to print and the exit code.
    """

    def __init__(self, presence: Presence, abort: Abort) -> None:
        self._presence = presence
        self._abort = abort
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpiddp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before MPI is finalised."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        seen: Operation | None = None
        since = asked = 0.0
        while not self._stop.wait(LOOK_S):
            self._presence.pump()
            current, now = operation.running, time.monotonic()
            if current is None or current is not seen:
                seen, since, asked = current, now, 0.0
                continue
            if now - since > PATIENCE_S and self._presence.departed(current) and current is operation.running:
                gone = ", ".join(map(str, self._presence.departed(current)))
                self._end(
                    f"{current} cannot end: rank {gone} of the group ended its program without taking part in it."
                    " Every rank has to call the same operations in the same order; look for a loop, an early return"
                    " or a sys.exit that only some ranks reach (uneven inputs: DistributedDataParallel.join)",
                    code=1,
                )
            if not current.limited and now - since > current.link.timeout_s:
                self._end(
                    f"{current} did not finish in {current.link.timeout_s:g} s: {self._presence.explain(current)}",
                    EXIT_TIMEOUT,
                )
            # The first question leaves before patience ends, so that its answer is there when it is wanted.
            if now - since > PATIENCE_S - 3 * LOOK_S and now - asked > PATIENCE_S:
                self._presence.ask(current)
                asked = now

    def _end(self, text: str, code: int) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        self._abort(text, code)

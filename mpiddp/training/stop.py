"""Requests to stop a run: signals and a deadline. The trainer checks for a request once a step."""

import contextlib
import math
import re
import signal
import time
from types import FrameType

from mpiddp import settings

from .options import UsageError


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``90``, ``M:SS`` or ``H:MM:SS``; None for ``slurm``.

    UsageError for any other text.

    >>> parse_duration("1:30:00")
    5400.0
    """
    if text == "slurm":
        return None
    parts = text.split(":") if re.fullmatch(r"(\d+:)?(\d+:)?\d+(\.\d*)?", text) else []
    seconds = sum(float(part) * 60.0**place for place, part in enumerate(reversed(parts)))
    if seconds <= 0:
        raise UsageError(f"--max-time has to be seconds, M:SS, H:MM:SS, above 0, or slurm, got {text!r}")
    return seconds


def seconds_left(max_time: str, began_s: float) -> float:
    """Return the seconds until the run, which began at ``began_s``, has to end by ``--max-time``.

    UsageError if ``max_time`` is ``slurm``, but the environment does not say when the Slurm job ends.
    """
    seconds = parse_duration(max_time)
    if seconds is not None:
        return began_s + seconds - time.monotonic()
    end_s = settings.job_end_s()
    if end_s is None:
        raise UsageError(
            "--max-time slurm needs SLURM_JOB_END_TIME, which Slurm 23.02 and later set in a job, and slurm/env.sh with"
            " any; give the time instead"
        )
    return end_s - time.time()


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a run to stop. Batch systems send SIGTERM at the time limit and, on request, SIGUSR1 before it."""


class StopRequest(contextlib.ExitStack):
    """The request to stop a run: its first signal, or its deadline. A second Ctrl-C raises KeyboardInterrupt at once.

    Only the main thread can make this object, because it installs signal handlers. At first it handles SIGUSR1 alone:
    MPI_Init of MPICH installs a handler of its own, in which this signal would be lost. Until `listen` installs the
    handlers of the other signals, these end the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.late = False
        self._interrupted = False
        self._latest_s = self._asked_s = math.inf
        self._longest_s = 0.0
        self._take(signal.SIGUSR1)

    def listen(self, end_s: float = math.inf, margin_s: float = 0) -> None:
        """Handle all of `STOP_SIGNALS`, and request a stop in time for a deadline, ``end_s`` of ``time.monotonic()``.

        The last step then ends ``margin_s`` before the deadline, if no step lasts longer than the longest one so far.
        """
        self._latest_s = end_s - margin_s
        self._take(*STOP_SIGNALS)

    def _take(self, *numbers: signal.Signals) -> None:
        for each in numbers:
            self.callback(signal.signal, each, signal.signal(each, self._remember))

    def __call__(self) -> bool:
        """Return True if this rank is asked to stop. The trainer calls this once a step."""
        now_s = time.monotonic()
        self._asked_s, self._longest_s = now_s, max(self._longest_s, now_s - self._asked_s)
        # Two steps have to fit into the time left: the current one, and the next, in which the trainer asks again.
        self.late = self.late or now_s + 2 * self._longest_s >= self._latest_s
        return self.number != 0 or self.late

    @property
    def reason(self) -> str | None:
        if self.number:
            return signal.Signals(self.number).name
        return "--max-time" if self.late else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.number = self.number or number

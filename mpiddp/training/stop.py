"""Requests to stop a run, asked for once a step: signals, and a deadline."""

import contextlib
import math
import re
import signal
import time
from types import FrameType

from mpiddp import settings

from .options import UsageError


def parse_duration(text: str) -> float | None:
    """Return seconds, of a number of them, ``M:SS`` or ``H:MM:SS``; None for ``slurm``; UsageError.

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
    """Return the seconds until the end; UsageError for ``slurm`` without an announced one."""
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
"""Batch systems send SIGUSR1 before the time limit, on request, and SIGTERM at it."""


class StopRequest(contextlib.ExitStack):
    """Records the first signal that asks a run to stop; a second Ctrl-C interrupts at once.

    It is for the main thread. At first it takes SIGUSR1 alone, which MPICH's MPI_Init has begun to ignore; `listen`
    takes the others, too.
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
        """Take all signals, and stop ``margin_s`` before ``time.monotonic()`` is ``end_s``.

        A step is taken to last as long as the longest one so far.
        """
        self._latest_s = end_s - margin_s
        self._take(*STOP_SIGNALS)

    def _take(self, *numbers: signal.Signals) -> None:
        for each in numbers:
            self.callback(signal.signal, each, signal.signal(each, self._remember))

    def __call__(self) -> bool:
        """Return True if this rank is asked to stop; called once a step."""
        now_s = time.monotonic()
        self._asked_s, self._longest_s = now_s, max(self._longest_s, now_s - self._asked_s)
        # Twice: the current step has to end, and another one would follow.
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

"""Requests to stop a run, asked for once a step: signals, and a deadline."""

from __future__ import annotations

import re
import signal
import time
from types import FrameType
from typing import Any, Self

from mpiddp import settings

from .options import UsageError


def parse_duration(text: str) -> float | None:
    """Return seconds, of a number of them, ``M:SS`` or ``H:MM:SS``; None for ``slurm``; UsageError.

    >>> parse_duration("1:30:00")
    5400.0
    """
    if text == "slurm":
        return None
    if not re.fullmatch(r"(\d+:)?(\d+:)?\d+(\.\d*)?", text):
        raise UsageError(f"--max-time has to be seconds, M:SS, H:MM:SS or slurm, got {text!r}")
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    if seconds <= 0:
        raise UsageError(f"--max-time has to be longer than no time, got {text!r}")
    return seconds


class Deadline:
    """The time at which a run has to stop: ``end_s`` by ``time.monotonic()``, less ``margin_s``.

    A step is taken to last as long as the longest one so far.

    >>> Deadline(time.monotonic() + 60, margin_s=30).due()
    False
    """

    def __init__(self, end_s: float, margin_s: float) -> None:
        self.end_s = end_s
        self.margin_s = margin_s
        self._asked_s: float | None = None
        self._longest_s = 0.0

    def due(self) -> bool:
        """Return True if the current step has to be the last; asked once a step."""
        now_s = time.monotonic()
        if self._asked_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._asked_s)
        self._asked_s = now_s
        # Twice: the current step has to end, and another one would follow.
        return now_s + 2 * self._longest_s + self.margin_s >= self.end_s


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


class StopRequest:
    """Records the first signal that asks a run to stop; a second Ctrl-C interrupts at once.

    It is for the main thread. On entry it takes SIGUSR1 alone, which MPICH's MPI_Init has begun to ignore; `listen`
    takes the others, too.
    """

    def __init__(self) -> None:
        self.number = 0
        self.late = False
        self._interrupted = False
        self._deadline: Deadline | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._remember)}
        return self

    def listen(self, deadline: Deadline | None = None) -> None:
        self._deadline = deadline
        for each in STOP_SIGNALS:
            self._before.setdefault(each, signal.signal(each, self._remember))

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def __call__(self) -> bool:
        """Return True if this rank is asked to stop; called once a step."""
        if self._deadline is not None and self._deadline.due():
            self.late = True
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

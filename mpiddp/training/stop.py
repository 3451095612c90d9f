"""Requests to stop a run, asked for once a step: signals, and a deadline."""

from __future__ import annotations

import re
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from mpiddp import settings

from .options import UsageError


def parse_duration(text: str) -> float | None:
    """Return seconds, of a number of them, of ``M:SS`` or of ``H:MM:SS``; None for ``slurm``.

    Raises
    ------
    UsageError
        If it is none of these, or no time at all.

    Examples
    --------
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
    """Tells, asked once a step, that there is no time for another step.

    Parameters
    ----------
    end_s : float
        When all is to be over, as ``time.monotonic()`` counts, whatever is done to the clock meanwhile.
    margin_s : float
        Time before that to leave for what comes after the last step, such as a checkpoint.

    Notes
    -----
    Another step takes, for all that is known, as long as the longest time between two questions so far, which may have
    had a test or a checkpoint in it.

    Examples
    --------
    >>> Deadline(time.monotonic() + 60, margin_s=30).due()
    False
    """

    def __init__(self, end_s: float, margin_s: float) -> None:
        self.end_s = end_s
        self.margin_s = margin_s
        self._asked_s: float | None = None
        self._longest_s = 0.0

    def due(self) -> bool:
        """Tell whether the step that runs has to be the last one."""
        now_s = time.monotonic()
        if self._asked_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._asked_s)
        self._asked_s = now_s
        # The step that runs has still to end, and another one would come after it.
        return now_s + 2 * self._longest_s + self.margin_s >= self.end_s


def deadline_of(max_time: str, margin_s: float, began_s: float) -> Deadline:
    """Return the deadline of a run.

    Parameters
    ----------
    max_time : str
        As `parse_duration` takes it.
    margin_s : float
        See `Deadline`.
    began_s : float
        When the run began, as ``time.monotonic()`` counts.

    Raises
    ------
    UsageError
        If ``max_time`` is ``slurm``, and Slurm has not said when the job ends.
    """
    seconds = parse_duration(max_time)
    if seconds is not None:
        return Deadline(began_s + seconds, margin_s)
    end_s = settings.job_end_s()
    if end_s is None:
        raise UsageError(
            "--max-time slurm needs SLURM_JOB_END_TIME, which Slurm 23.02 and later set in a job, and slurm/env.sh with"
            " any; give the time instead"
        )
    return Deadline(time.monotonic() + end_s - time.time(), margin_s)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""SIGUSR1 is what a batch system is told to send before the time limit, SIGTERM what it sends at the limit."""


class StopRequest:
    """While it is entered, the first signal is remembered; a second Ctrl-C interrupts at once.

    To be entered in the main thread, as all handling of signals.

    Parameters
    ----------
    deadline : Deadline, optional
        When it is due, that is a reason to stop as well.

    Attributes
    ----------
    number : int
        The signal that came, or 0.
    late : bool
        Whether the deadline was due.
    """

    def __init__(self, deadline: Deadline | None = None) -> None:
        self.number = 0
        self.late = False
        self._interrupted = False
        self._deadline = deadline
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._remember) for each in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def __call__(self) -> bool:
        """Tell whether a signal has come, or there is no time for another step; to be asked once a step."""
        if self._deadline is not None and self._deadline.due():
            self.late = True
        return self.number != 0 or self.late

    @property
    def reason(self) -> str | None:
        """What asked for the stop, in a word."""
        if self.number:
            return signal.Signals(self.number).name
        return "--max-time" if self.late else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.number = self.number or number

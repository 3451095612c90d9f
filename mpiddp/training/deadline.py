"""``Deadline``: the time at which a run is to have stopped. Imports the standard library and ``settings``."""

from __future__ import annotations

import re
import time

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

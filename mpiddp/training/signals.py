"""``StopRequest``: signals and a deadline that ask a run to stop become a flag, which is asked once a step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from .deadline import Deadline

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

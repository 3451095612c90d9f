"""``StepTimer``: the time that DDP's steps wait for communication, and their spans in a timeline."""

from __future__ import annotations

from time import perf_counter_ns

from .timeline import Timeline


class StepTimer:
    """Told by DDP and its reducer what begins and what ends, in this order in each step."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.exposed_ns = 0
        """The waits for communication at the ends of backward passes."""
        self._forward_ns = self._backward_ns = self._wait_ns = 0
        self._has_forward = False
        """False on a rank without inputs, which has neither forward nor backward to show."""

    def begin_forward(self) -> None:
        self._forward_ns, self._has_forward = perf_counter_ns(), True

    def end_forward(self) -> None:
        self._show("forward", self._forward_ns, perf_counter_ns())

    def begin_backward(self) -> None:
        self._backward_ns = perf_counter_ns()

    def begin_wait(self) -> None:
        """Note that backward has computed everything."""
        self._wait_ns = perf_counter_ns()
        if self._has_forward:
            self._show("backward", self._backward_ns, self._wait_ns)

    def end_wait(self) -> None:
        """Note that all buckets hold their averages."""
        now_ns = perf_counter_ns()
        self.exposed_ns += now_ns - self._wait_ns
        self._show("wait", self._wait_ns, now_ns)
        self._has_forward = False

    def _show(self, lane: str, begin_ns: int, end_ns: int) -> None:
        if self.timeline is not None:
            self.timeline.add(lane, lane, begin_ns, end_ns)

"""Where the time of a training step goes: a handful of clock readings in each iteration. Imports `timeline`."""

from __future__ import annotations

from time import perf_counter_ns

from .timeline import Timeline


class StepTimes:
    """Moments of the last iteration and sums over all reduced ones, in nanoseconds.

    The communication of an iteration lasts from its first bucket to the end of the last; what of it lies before the end
    of backward's own work is hidden, the rest is exposed.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        """Where to note the spans, if anywhere."""
        self._forward = self._backward = self._communication = self._wait = self._end = 0
        self._has_forward = False
        self._sums = {
            "forward_compute": 0,
            "backward_compute": 0,
            "backward_comm": 0,
            "backward_compute_comm_overlap": 0,
        }
        self._last = dict(self._sums)
        self._iterations = 0
        self.exposed_ns = 0
        """Time that backward passes have waited for communication at their ends, in all."""

    def begin_forward(self) -> None:
        """Note that forward begins."""
        self._forward, self._has_forward = perf_counter_ns(), True

    def end_forward(self) -> None:
        """Note that forward ends."""
        if self.timeline is not None:
            self.timeline.add("forward", "forward", self._forward, perf_counter_ns())

    def begin_backward(self) -> None:
        """Note that backward begins."""
        self._backward = perf_counter_ns()
        self._communication = 0

    def begin_communication(self) -> None:
        """Note that the first bucket is sent."""
        self._communication = perf_counter_ns()

    def begin_wait(self) -> None:
        """Note that backward has nothing more to compute."""
        self._wait = perf_counter_ns()
        if self.timeline is not None and self._has_forward:
            self.timeline.add("backward", "backward", self._backward, self._wait)

    def end_wait(self) -> None:
        """Note that all buckets hold their averages."""
        self._end = perf_counter_ns()
        self.exposed_ns += self._end - self._wait
        if self.timeline is not None:
            self.timeline.add("wait", "wait", self._wait, self._end)
        if not self._has_forward:  # a rank without inputs has nothing to measure
            return
        self._has_forward = False
        self._iterations += 1
        self._last = {
            "forward_compute": self._backward - self._forward,
            "backward_compute": self._wait - self._backward,
            "backward_comm": self._end - self._communication,
            "backward_compute_comm_overlap": max(self._wait - self._communication, 0),
        }
        for name, value in self._last.items():
            self._sums[name] += value

    def summary_ns(self) -> dict[str, int]:
        """Return the last iteration's times and the averages over all, under torch's names."""
        last = {f"{name}_time": value for name, value in self._last.items()}
        averages = {f"avg_{name}_time": value // max(self._iterations, 1) for name, value in self._sums.items()}
        return last | averages

"""A timeline of forward, backward, communication and waits on all ranks: a trace for Chrome, and a summary.

ui.perfetto.dev shows the trace, too. The ranks exchange messages at the beginning and the end to measure how far their
clocks differ. Between these two times the difference is interpolated.
"""

import atexit
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from mpiddp import settings
from mpiddp.distributed import ProcessGroup, gather_object, is_initialized, recv, send
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.mpi.link import Resource
from mpiddp.optim import Optimizer
from mpiddp.serialization import write_synced

_ROUNDS = 16
_MOST_SPANS = 1_000_000
LANES = ("forward", "backward", "wait", "optimizer")
"""The lanes (rows of the trace) that come first for each rank. Others follow in the order of their first spans."""


class Span(NamedTuple):
    lane: str
    name: str
    begin_ns: int
    end_ns: int


class Clock(NamedTuple):
    """A time of this rank's clock, and how far the clock was ahead of the first rank's clock at that time."""

    at_ns: int
    ahead_ns: float


def compare_clocks(group: ProcessGroup) -> Clock:
    """Measure how far this rank's clock is ahead of the first rank's. All ranks call this together.

    The error is at most half of the round-trip time of 8 bytes between the two ranks.
    """
    rank, message = group.rank(), np.zeros(1, np.int64)
    mine = Clock(perf_counter_ns(), 0.0)
    for peer in range(1, group.size()):
        best = (sys.maxsize, 0.0)
        for _ in range(_ROUNDS if rank in (0, peer) else 0):
            if rank == 0:
                recv(message, group=group, group_src=peer)
                message[0] = perf_counter_ns()
                send(message, group=group, group_dst=peer)
            else:
                began = perf_counter_ns()
                send(message, group=group, group_dst=0)
                recv(message, group=group, group_src=0)
                ended = perf_counter_ns()
                best = min(best, (ended - began, (began + ended) / 2 - float(message[0])))
        if rank == peer:
            mine = Clock(perf_counter_ns(), best[1])
    return mine


class Timeline:
    """A recorder of spans of time on all ranks of a group, which writes them as one trace.

    Parameters
    ----------
    path : path-like
        The file that the first rank writes, in Chrome's trace format.
    group : ProcessGroup, optional
        The ranks that are recorded. All of them make the timeline together.

    Examples
    --------
    >>> timeline = dist.Timeline("trace.json")  # doctest: +SKIP
    >>> ddp.timeline = timeline  # doctest: +SKIP
    >>> timeline.watch(optimizer)  # doctest: +SKIP
    >>> train(ddp, optimizer)  # doctest: +SKIP
    >>> print(timeline.write())  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, group: GroupLike = None) -> None:
        self.path = Path(path)
        self.group = known(group)
        self.spans: list[Span] = []
        self._began = compare_clocks(self.group)

    def add(self, lane: str, name: str, begin_ns: int, end_ns: int) -> None:
        """Add a span, in nanoseconds of `time.perf_counter_ns`. At most a million spans are kept."""
        if len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(lane, name, begin_ns, end_ns))

    @contextmanager
    def span(self, lane: str, name: str | None = None) -> Iterator[None]:
        """Return a context that adds a span from its beginning to its end."""
        began = perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, name or lane, began, perf_counter_ns())

    def watch(self, optimizer: Optimizer) -> None:
        """Add a span for each later step of an optimizer."""
        step: Callable[..., Any] = optimizer.step

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self.span("optimizer", "step"):
                return step(*args, **kwargs)

        vars(optimizer)["step"] = noted

    def _aligned(self) -> list[Span]:
        first, last = self._began, compare_clocks(self.group)
        drift = (last.ahead_ns - first.ahead_ns) / max(last.at_ns - first.at_ns, 1)

        def align(at_ns: int) -> int:
            return round(at_ns - first.ahead_ns - drift * (at_ns - first.at_ns))

        return [Span(lane, name, align(begin), align(end)) for lane, name, begin, end in self.spans]

    def write(self) -> str:
        """Write the trace. Return the summary, a table, on the first rank, and "" on the others.

        All ranks call this together.
        """
        group = self.group
        everybody: list[list[Span]] | None = [[]] * group.size() if group.rank() == 0 else None
        gather_object(self._aligned(), everybody, group=group, group_dst=0)
        if everybody is None:
            return ""
        text = summary(everybody)
        trace = {"traceEvents": events(everybody), "displayTimeUnit": "ms", "otherData": {"summary": text}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(self.path, json.dumps(trace).encode())
        return text


def events(everybody: list[list[Span]]) -> list[dict[str, Any]]:
    """Return the events of the trace, in which each rank is a process and each of its lanes a thread."""
    start = min((span.begin_ns for spans in everybody for span in spans), default=0)
    found: list[dict[str, Any]] = []
    for rank, spans in enumerate(everybody):
        found.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        lanes = {lane: index for index, lane in enumerate(dict.fromkeys((*LANES, *(span.lane for span in spans))))}
        for lane, index in lanes.items():
            found.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": lane}})
        for lane, name, begin, end in spans:
            at_us, took_us = (begin - start) / 1e3, (end - begin) / 1e3
            found.append({"ph": "X", "pid": rank, "tid": lanes[lane], "name": name, "ts": at_us, "dur": took_us})
    return found


def _mean_ms(spans: list[Span], lane: str) -> float:
    return statistics.fmean([span.end_ns - span.begin_ns for span in spans if span.lane == lane] or [0]) * 1e-6


def covered_ns(spans: list[Span]) -> int:
    total, reached = 0, 0
    for _, _, begin, end in sorted(spans, key=lambda span: span.begin_ns):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


def summary(everybody: list[list[Span]]) -> str:
    """Return a table with a row for each rank.

    "exposed" is the time that a rank waits at the end of backward, and "overlap" the share of communication for which
    it does not wait. "late" is the mean time from the end of the earliest rank's backward to the end of this rank's.
    "last" is the number of steps in which this rank's backward ended last.
    """
    arrivals = [[span.begin_ns for span in spans if span.lane == "wait"] for spans in everybody]
    steps = list(zip(*arrivals, strict=False))
    lines = ["rank   steps  forward ms  backward ms  comm ms  exposed ms  overlap  late ms  last"]
    for rank, spans in enumerate(everybody):
        count = len(arrivals[rank])
        communicated = covered_ns([span for span in spans if span.lane.startswith("bucket")]) * 1e-6 / max(count, 1)
        exposed = _mean_ms(spans, "wait")
        overlap = 1 - min(exposed / communicated, 1) if communicated else 0.0
        late = statistics.fmean([step[rank] - min(step) for step in steps] or [0]) * 1e-6
        last = sum(step[rank] == max(step) for step in steps)
        lines.append(
            f"{rank:4} {count:7} {_mean_ms(spans, 'forward'):11.3f} {_mean_ms(spans, 'backward'):12.3f}"
            f" {communicated:8.3f} {exposed:11.3f} {overlap:8.0%} {late:8.3f} {last:5}"
        )
    return "\n".join(lines)


_asked_for: Timeline | None = None


def timeline_of_environment(group: ProcessGroup) -> Timeline | None:
    """Return the timeline that ``MPIDDP_TIMELINE`` requests, or None.

    It is written when its group is destroyed, or when the program ends.
    """
    global _asked_for
    path = settings.timeline()
    if path is None:
        return None
    if _asked_for is None or _asked_for.group._link.closed:
        _asked_for = Timeline(path, group)
        group._link.own(_WriteAtEnd())
        atexit.register(_at_exit)
    return _asked_for


class _WriteAtEnd(Resource):
    def close(self) -> None:
        global _asked_for
        if _asked_for is not None:
            timeline, _asked_for = _asked_for, None
            text = timeline.write()
            if text:
                print(f"{text}\ntimeline written to {timeline.path}", file=sys.stderr)


def _at_exit() -> None:
    if is_initialized():
        _WriteAtEnd().close()

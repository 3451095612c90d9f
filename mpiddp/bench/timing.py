"""Times of calls on a group of ranks: each measures its call after a barrier, and the slowest counts.

Ranks leave a barrier at different moments: differences below a microsecond mean nothing. Arrays that stay in the caches
flatter a second call; `before` therefore writes them anew, outside of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI

BUDGET_S = 0.1
"""Time for one size, if the number of iterations is not given."""
_FEWEST, _MOST = 20, 10_000
"""Iterations for one size."""

Call = Callable[[], object]


def nothing() -> None:
    """Do nothing before a call."""


class Way(NamedTuple):
    call: Call
    iterations: int = 1
    before: Call = nothing


class Clock:
    """Measures calls that all ranks of its own communicator make together."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def close(self) -> None:
        self._comm.Free()

    def each(self, call: Call, iterations: int, before: Call = nothing) -> list[float]:
        """Return the slowest rank's seconds in each iteration, on all ranks; ``before`` runs unmeasured."""
        barrier, now = self._comm.Barrier, time.perf_counter
        took = np.empty(iterations)
        for index in range(iterations):
            before()
            barrier()
            start = now()
            call()
            took[index] = now() - start
        self._comm.Allreduce(MPI.IN_PLACE, took, MPI.MAX)
        return took.tolist()

    def enough(self, call: Call, warmup: int, before: Call, budget_s: float, rounds: int) -> int:
        """Warm up, and return the iterations of each of some rounds that fit into a budget, on all ranks alike."""
        took = self.each(call, max(warmup, 1), before)
        return -(-int(min(max(budget_s / max(min(took), 1e-7), _FEWEST), _MOST)) // rounds)

    def take_turns(self, ways: Mapping[str, Way], rounds: int) -> dict[str, list[list[float]]]:
        """Measure in turn, so that the machine's other load meets all alike.

        The order rotates. An unmeasured call at the head of each turn brings code and data back into the caches.
        """
        took: dict[str, list[list[float]]] = {name: [] for name in ways}
        names = list(ways)
        for index in range(rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                call, iterations, before = ways[name]
                before()
                call()
                took[name].append(self.each(call, iterations, before))
        return took

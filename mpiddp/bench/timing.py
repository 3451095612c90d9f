"""Times of calls that a group of ranks makes together. Each rank times its call after a barrier; the slowest counts.

Ranks leave a barrier at slightly different moments, so differences below a microsecond mean nothing. If a call is
repeated on arrays that nobody has written meanwhile, it is faster than in a program, because the arrays are still in
the caches. Benchmarks of operations therefore pass a function ``before``, which writes the arrays anew before each
call. Its time is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI

BUDGET_S = 0.1
"""Seconds to spend on one size and contender, if the number of iterations is not given."""
_FEWEST, _MOST = 20, 10_000
"""Limits of the number of iterations for one size, if the number is not given."""

Call = Callable[[], object]


def nothing() -> None:
    """Do nothing: the default of the function that runs before each call."""


class Way(NamedTuple):
    call: Call
    iterations: int = 1
    before: Call = nothing


class Clock:
    """A clock for calls that all ranks of a communicator make together. The clock owns the communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def close(self) -> None:
        self._comm.Free()

    def each(self, call: Call, iterations: int, before: Call = nothing) -> list[float]:
        """Return, on all ranks, the slowest rank's seconds for each iteration of ``call``.

        ``before`` runs before each iteration and is not measured.
        """
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
        """Warm up, and return the number of iterations a round, so that all rounds together take about ``budget_s``.

        The rounds have `_FEWEST` to `_MOST` iterations together. All ranks get the same number.
        """
        took = self.each(call, max(warmup, 1), before)
        return -(-int(min(max(budget_s / max(min(took), 1e-7), _FEWEST), _MOST)) // rounds)

    def take_turns(self, ways: Mapping[str, Way], rounds: int) -> dict[str, list[list[float]]]:
        """Measure several calls in turns, and return each one's seconds, a list for each round.

        They take turns, so that other load of the machine slows all of them down alike. Each round begins with another
        call. An unmeasured call at the start of a turn brings its code and data back into the caches.
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

"""How long a call takes on a group of ranks.

All ranks leave a barrier, each measures its own call, and the time of an iteration is that of the slowest rank. The
barrier is not in it, but some of the ranks leave it later than others: differences below a microsecond mean nothing.
Arrays stay the same from one iteration to the next, so what fits into a cache is found there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI

BUDGET_S = 0.1
"""What the iterations of one size may take where their number is not given."""
FEWEST, MOST = 20, 2000


class Times(NamedTuple):
    """What the iterations of a call took, in seconds."""

    median: float
    min: float
    max: float
    iterations: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Summarise measured times."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


class Clock:
    """Measures calls that all ranks make together.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator of its own, of all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()

    def each(self, call: Callable[[], object], iterations: int) -> list[float]:
        """Call so many times, and return how long the slowest rank took each time, on all ranks."""
        barrier, now = self._comm.Barrier, time.perf_counter
        took = np.empty(iterations)
        for index in range(iterations):
            barrier()
            start = now()
            call()
            took[index] = now() - start
        self._comm.Allreduce(MPI.IN_PLACE, took, MPI.MAX)
        return [float(seconds) for seconds in took]

    def enough(self, call: Callable[[], object], warmup: int, budget_s: float = BUDGET_S, fewest: int = FEWEST) -> int:
        """Warm up, and return how many iterations fit into a budget, on all ranks alike."""
        took = self.each(call, max(warmup, 1))
        return int(min(max(budget_s / max(min(took), 1e-7), fewest), MOST))

    def measure(self, call: Callable[[], object], iterations: int | None, warmup: int) -> Times:
        """Warm up and measure; None is as many iterations as fit into `BUDGET_S`, and at least `FEWEST`."""
        fitting = self.enough(call, warmup)
        return Times.of(self.each(call, iterations or fitting))

"""``bench tune``: algorithms that are faster than the built-in table on this machine, MPI library and group.

All algorithms of an operation take turns on ordinary and on symmetric arrays. ``MPIDDP_ALGORITHM`` cannot tell the two
apart, nor sizes, so the geometric mean of all times counts: five times faster on one kind outweighs twice slower on the
other. The result is the line to set.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping

import numpy as np

import mpiddp.distributed as dist
from mpiddp import settings
from mpiddp.algorithms import plan
from mpiddp.mpi.link import Link
from mpiddp.shm.eager import EagerBuffers
from mpiddp.training.config import UsageError

from . import sizes
from .buffers import Buffers
from .contenders import Mpiddp, choosing
from .job import Job, header, job, ordinary, symmetric

_ROUND_S = 0.005
_FEWEST = 2
_LEAD = 1.05
"""So many times faster is really faster."""

Seconds = Mapping[str, tuple[float, float]]
"""What each algorithm takes on ordinary and on symmetric arrays."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the line to set, and return the exit code."""
    if settings.algorithms():
        raise UsageError("bench tune compares with the built-in table, which MPIDDP_ALGORITHM overrides: unset it")
    with job() as here:
        if here.size == 1:
            raise UsageError("bench tune needs two ranks or more: one rank has nothing to choose")
        here.say(header(here.environment()))
        found = {operation: _tune(here, operation, arguments) for operation in plan.ONE_NODE}
        for operation, (name, gain) in found.items():
            here.say(f"{operation:15}{name}" + f", {gain:.2f} times as fast as the built-in table" * (name != _TABLE))
        line = ",".join(f"{operation}:{name}" for operation, (name, _) in found.items() if name != _TABLE)
        if line:
            here.say(f"for jobs of as many ranks on as many nodes: MPIDDP_ALGORITHM={line}")
        else:
            here.say("the built-in table is the best for all operations: there is nothing to set")
    return 0


_TABLE = "the built-in table"


def candidates(operation: str, link: Link) -> list[str]:
    """Return the algorithms that may serve a group for an operation, native first."""
    # The exchange is for reductions that MPI does not define.
    left_out = {"exchange", "hierarchical" if link.one_node else "two_shot"}
    if link.find(EagerBuffers) is None:
        left_out.add("one_shot")
    return [name for name in plan.offering(operation) if name not in left_out]


def _tune(here: Job, operation: str, arguments: argparse.Namespace) -> tuple[str, float]:
    """Return what `best` returns for an operation."""
    link = dist.groups.default_group().link
    names = candidates(operation, link)
    kind = np.dtype(np.float32)
    shared = symmetric(max(arguments.sizes) + here.size * kind.itemsize)
    here.say(f"# {operation}: us on ordinary/symmetric arrays; * marks the choice of the built-in table")
    here.say("#".ljust(8) + "".join(name.rjust(20) for name in names))
    measured: dict[int, Seconds] = {}
    table: dict[int, str] = {}
    for size in arguments.sizes:
        pair = [
            Buffers(operation, here.rank, here.size, size, kind, "sum", allocate) for allocate in (ordinary, shared)
        ]
        table[size] = plan.algorithm_of(operation, link, pair[0].total_bytes)
        measured[size] = _measure(here, pair, names, arguments.rounds)
        cells = [
            f"{'*' * (name == table[size])}{plain * 1e6:.1f}/{there * 1e6:.1f}"
            for name, (plain, there) in measured[size].items()
        ]
        here.say(sizes.text(size).rjust(8) + "".join(cell.rjust(20) for cell in cells))
    return best(measured, table)


def _measure(here: Job, pair: list[Buffers], names: list[str], rounds: int) -> Seconds:
    """Return the median over rounds of what each algorithm takes on each of the arrays."""
    took: dict[tuple[str, int], list[float]] = {(name, index): [] for name in names for index in range(len(pair))}
    calls = [Mpiddp().prepare(buffers) for buffers in pair]
    for buffers in pair:
        buffers.rest()
    for _ in range(rounds):
        for name in names:
            with choosing(pair[0].operation, name):
                for index, call in enumerate(calls):
                    count = here.clock.enough(call, 2, _ROUND_S, _FEWEST)
                    took[name, index].append(statistics.median(here.clock.each(call, count)))
    return {name: (statistics.median(took[name, 0]), statistics.median(took[name, 1])) for name in names}


def best(measured: Mapping[int, Seconds], table: Mapping[int, str]) -> tuple[str, float]:
    """Return the algorithm for all sizes that is faster than the table by more than chance, and how many times.

    Parameters
    ----------
    measured : mapping
        By size in bytes, what each algorithm took; all sizes have the same algorithms.
    table : mapping
        By size, the algorithm that the built-in table chooses.

    Returns
    -------
    tuple of str and float
        ``("the built-in table", 1.0)`` where no algorithm is faster.

    Examples
    --------
    >>> times = {1024: {"native": (2, 2), "ring": (4, 4)}, 4096: {"native": (16, 16), "ring": (2, 2)}}
    >>> name, gain = best(times, {1024: "native", 4096: "native"})
    >>> name, round(gain, 3)
    ('ring', 2.0)
    >>> best(times, {1024: "native", 4096: "ring"})
    ('the built-in table', 1.0)
    """
    gains = {
        name: math.sqrt(
            statistics.geometric_mean(
                math.prod(seconds[table[size]]) / math.prod(seconds[name]) for size, seconds in measured.items()
            )
        )
        for name in next(iter(measured.values()))
    }
    name = max(gains, key=lambda each: gains[each])
    return (name, gains[name]) if gains[name] > _LEAD else (_TABLE, 1.0)

"""``bench tune``: the best algorithms for this machine, MPI library and shape of the group, kept for later runs.

All algorithms of an operation take turns on ordinary and on symmetric arrays. The table cannot tell the two apart, so
what counts is the geometric mean of both times: five times faster on one kind outweighs twice slower on the other. A
row begins where an algorithm is better than that of the row before by more than chance.
"""

from __future__ import annotations

import argparse
import math
import socket
import statistics
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpiddp.algorithms import plan, tuned
from mpiddp.mpi import launch
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
    """Measure, print the table, write it, and return the exit code."""
    with job() as here:
        if here.size == 1:
            raise UsageError("bench tune needs two ranks or more: one rank has nothing to choose")
        here.say(header(here.environment()))
        table = {operation: _tune(here, operation, arguments) for operation in plan.ONE_NODE}
        for operation, rows in table.items():
            here.say(f"{operation:15}" + ", then ".join(_phrase(*row) for row in rows))
        file = tuned.path(launch.library_name(), socket.gethostname())
        shape = tuned.shape(here.world.nodes)
        if arguments.dry_run:
            here.say("nothing written (--dry-run)")
        else:
            here.together(lambda: _keep(file, shape, table))
            here.say(f"wrote {file} for groups of {shape} ranks; MPIDDP_TUNED=0 ignores it")
    return 0


def _phrase(end: float, name: str) -> str:
    return name if end == plan.ANY_SIZE else f"{name} up to {sizes.text(end)}"


def _keep(file: Path, shape: str, table: tuned.Table) -> None:
    """Add a table to what the file has for other shapes."""
    try:
        tables = tuned.read(file)
    except ValueError:
        tables = {}
    try:
        tuned.write(file, {**tables, shape: table})
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; MPIDDP_CACHE=DIR names another folder") from error


def candidates(operation: str, one_node: bool) -> list[str]:
    """Return the algorithms that a group on one node, or on several, may use for an operation; native first."""
    # The exchange is for reductions that MPI does not define.
    left_out = ("exchange", "hierarchical" if one_node else "two_shot")
    return [name for name in plan.offering(operation) if name not in left_out]


def _tune(here: Job, operation: str, arguments: argparse.Namespace) -> tuned.Rows:
    """Return the rows for an operation."""
    names = candidates(operation, len(set(here.world.nodes)) == 1)
    kind = np.dtype(np.float32)
    shared = symmetric(max(arguments.sizes) + here.size * kind.itemsize)
    here.say(f"# {operation}: us on ordinary/symmetric arrays")
    here.say("#".ljust(8) + "".join(name.rjust(20) for name in names))
    measured: dict[int, Seconds] = {}
    for size in arguments.sizes:
        pair = [
            Buffers(operation, here.rank, here.size, size, kind, "sum", allocate) for allocate in (ordinary, shared)
        ]
        measured[size] = _measure(here, pair, names, arguments.rounds)
        cells = [f"{plain * 1e6:.1f}/{there * 1e6:.1f}" for plain, there in measured[size].values()]
        here.say(sizes.text(size).rjust(8) + "".join(cell.rjust(20) for cell in cells))
    return best_rows(measured)


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


def best_rows(measured: Mapping[int, Seconds]) -> tuned.Rows:
    """Return the rows of a table that has the best algorithm for every size.

    Parameters
    ----------
    measured : dict
        By size in bytes, what each algorithm took; all sizes have the same algorithms, "native" among them.

    Examples
    --------
    >>> best_rows({1024: {"native": (1, 1), "ring": (9, 9)}, 4096: {"native": (9, 9), "ring": (3, 3)}})
    ((2048, 'native'), (inf, 'ring'))
    """
    rows: list[tuple[float, str]] = []
    current, before = "native", 0
    for size, seconds in sorted(measured.items()):
        means = {name: math.sqrt(plain * there) for name, (plain, there) in seconds.items()}
        best = min(means, key=lambda name: means[name])
        if means[current] > _LEAD * means[best]:
            if before:
                rows.append((round(math.sqrt(before * size)), current))
            current = best
        before = size
    return (*rows, (plan.ANY_SIZE, current))

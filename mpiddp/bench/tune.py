"""``bench tune``: find the ``MPIDDP_ALGORITHM`` that is fastest on this machine, with this MPI library and job size.

The `candidates` for an operation take turns on ordinary and on symmetric arrays, which are written anew before each
call. ``MPIDDP_ALGORITHM`` sets one algorithm for all sizes and both kinds of arrays, so algorithms are compared by the
geometric mean of their times.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Mapping

import mpiddp.distributed as dist
from mpiddp import settings
from mpiddp.algorithms import plan
from mpiddp.algorithms.ways import Ways
from mpiddp.mpi.link import Link
from mpiddp.shm.eager import EagerBuffers
from mpiddp.training.options import UsageError

from .compare import measure
from .job import Bench, job
from .operations import Contender, mpiddp
from .results import format_size

_BUDGET_S = 0.025
KINDS = ("ordinary", "symmetric")
_LEAD = 1.05
"""An algorithm has to be this many times as fast as the built-in choices; a smaller gain may be chance."""

Seconds = Mapping[str, tuple[float, float]]
"""For each algorithm, by name: its times on ordinary and on symmetric arrays, in seconds."""


def run(arguments: argparse.Namespace) -> int:
    if settings.algorithms():
        raise UsageError("bench tune compares with the built-in table, which MPIDDP_ALGORITHM overrides: unset it")
    with job(arguments) as here:
        if here.size == 1:
            raise UsageError("bench tune needs two ranks or more: one rank has nothing to choose")
        found = {operation: _tune(here, operation, arguments) for operation in plan.ONE_NODE}
        for operation, (name, gain) in found.items():
            here.say(f"{operation:15}{name}" + f", {gain:.2f} times as fast as the built-in table" * (name != _TABLE))
        for operation, text in dist.groups.default_group()._link.resource(Ways).described().items():
            here.say(f"{operation:15}ordinary arrays go by {text}")
        line = ",".join(f"{operation}:{name}" for operation, (name, _) in found.items() if name != _TABLE)
        if line:
            here.say(f"for jobs of as many ranks on as many nodes: MPIDDP_ALGORITHM={line}")
        else:
            here.say("the built-in table is the best for all operations: there is nothing to set")
    return 0


_TABLE = "the built-in table"


def candidates(operation: str, link: Link) -> list[str]:
    """List the algorithms that can run an operation in a group and are worth measuring."""
    # "exchange" serves only reductions that MPI does not define.
    left_out = {"exchange", *(("hierarchical",) if link.one_node else ("two_shot", *plan.WAYS))}
    if link.find(EagerBuffers) is None:
        left_out.add("one_shot")
    return [name for name in plan.offering(operation) if name not in left_out]


def _tune(here: Bench, operation: str, arguments: argparse.Namespace) -> tuple[str, float]:
    link = dist.groups.default_group()._link
    names = candidates(operation, link)
    here.say(f"# {operation}: us on ordinary/symmetric arrays; * marks the choice of the built-in table")
    here.say("#".ljust(8) + "".join(name.rjust(20) for name in names))
    contenders = [
        Contender(f"{kind} {name}", functools.partial(mpiddp, algorithm=name), name, kind == "symmetric")
        for name in names
        for kind in KINDS
    ]
    arguments.operation = operation
    measured: dict[int, Seconds] = {}
    table: dict[int, str] = {}
    for found in measure(here, contenders, arguments, _BUDGET_S):
        size = found[contenders[0].name].size_bytes
        table[size] = plan.algorithm_of(operation, link, size)
        plain, there = ([found[f"{kind} {name}"].median_s for name in names] for kind in KINDS)
        measured[size] = dict(zip(names, zip(plain, there, strict=True), strict=True))
        cells = [
            f"{'*' * (name == table[size])}{one * 1e6:.1f}/{other * 1e6:.1f}"
            for name, (one, other) in measured[size].items()
        ]
        here.say(format_size(size).rjust(8) + "".join(cell.rjust(20) for cell in cells))
    return best(measured, table)


def best(measured: Mapping[int, Seconds], table: Mapping[int, str]) -> tuple[str, float]:
    """Return the algorithm that is fastest over all sizes, and its gain.

    The gain is the time of the built-in choices divided by the algorithm's time. ``measured`` has the times and
    ``table`` the built-in choice, for each size in bytes. Unless the gain is above `_LEAD`, the name is "the built-in
    table" and the gain 1.

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

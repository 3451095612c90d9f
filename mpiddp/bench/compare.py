"""``bench compare``: mpiddp against plain mpi4py, memcpy, and torch on Gloo and on mpiddp, in one run.

These contenders take turns in the same processes, on arrays that are written anew before each call. A ratio of two
contenders is the median over the rounds of the ratio of their times.

The column mpi4py shows MPI's default algorithm. MPICH's release_gather is not the default; the README measures it.
"""

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import operations
from .cli import ALL, OPERATIONS
from .job import Bench, dtype, job, symmetric
from .operations import REDUCING, Buffers, Contender, check_reduction, new_series
from .results import Point, Series, format_size
from .timing import BUDGET_S, Call, Way

SYMMETRIC = "symmetric"
OURS = ("mpiddp", SYMMETRIC)
RATIOS = (
    ("mpi4py", "mpiddp"),
    ("mpi4py", SYMMETRIC),
    (SYMMETRIC, "memcpy"),
    ("gloo", "mpiddp"),
    ("gloo", SYMMETRIC),
    ("gloo", "torch"),
)
"""Pairs of contenders. The first one's time is divided by the second one's: above 1, the second one is faster."""


_SLOWER, _SLOWER_S = 1.1, 3e-6
"""An operation counts as slower than MPI's if its time is above `_SLOWER` times MPI's time plus `_SLOWER_S` seconds."""


class Measured(NamedTuple):
    point: Point
    rounds: list[float]


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison, and return the exit code: 1 if a result was wrong, else 0."""
    compared = OPERATIONS if arguments.operation == ALL else (arguments.operation,)
    for operation in compared:
        check_reduction(operation, arguments.op, dtype(arguments.dtype))
    with job() as here:
        here.describe()
        found = [
            *(Contender(name, operations.mpiddp, symmetric=name == SYMMETRIC) for name in OURS),
            Contender("mpi4py", lambda b: operations.mpi4py(b, here.comm)),
            Contender("memcpy", lambda b: operations.memcpy(b, here.comm)),
        ]
        torch = here.torch() if arguments.torch else None
        if torch is not None:
            found += torch.contenders
        series = []
        for operation in compared:
            arguments.operation = operation
            series += _compare(here, found, arguments)
        wrong = Counter[str]()
        for each in series:
            wrong[each.name] += sum(point.wrong or 0 for point in each.points)
        found_wrong = ", ".join(f"{name} {count} FAILED" for name, count in wrong.items() if count)
        here.say(f"# Wrong values: {found_wrong or '0 OK'}")

        slower, rows = count_slower(series)
        here.say(f"# Slower than MPI in {slower} of {rows} rows: more than {_SLOWER} of mpi4py's time + 3 us")
        if torch is not None:
            torch.close()
        here.write(arguments.json, "compare", series)
    return int(any(wrong.values()))


def _compare(here: Bench, found: list[Contender], arguments: argparse.Namespace) -> list[Series]:
    operation = arguments.operation
    names = [each.name for each in found]
    titles = [f"mpiddp {SYMMETRIC}" * (name == SYMMETRIC) or name for name in names]
    series = {name: new_series(title, here.size, arguments) for name, title in zip(names, titles, strict=True)}
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    redop = f" {arguments.op}" * (operation in REDUCING)
    here.say(f"# {operation}{redop} of {arguments.dtype}, written anew before each call; median time of the slowest")
    here.say("# rank in us, then ratios of times")
    here.say(_line("size", names, [f"{slow}/{fast}" for slow, fast in ratios], "algorithm"))
    for measured in measure(here, found, arguments):
        for name, each in measured.items():
            series[name].points.append(each.point)
        times = [f"{measured[name].point.median_s * 1e6:.1f}" if name in measured else "-" for name in names]
        quotients = [_ratio(measured, *pair) for pair in ratios]
        ours = measured["mpiddp"].point
        here.say(_line(format_size(ours.size_bytes), times, quotients, ours.algorithm))
    return [each for each in series.values() if each.points]


def count_slower(series: list[Series]) -> tuple[int, int]:
    """Return the number of rows in which mpiddp is slower on ordinary arrays than mpi4py, and that of rows with both.

    A row is an operation and a size.
    """
    times: defaultdict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for each in series:
        times[each.name] |= {(each.operation, point.size_bytes): point.median_s for point in each.points}
    ours, theirs = times["mpiddp"], times["mpi4py"]
    both = ours.keys() & theirs.keys()
    return sum(ours[row] > _SLOWER * theirs[row] + _SLOWER_S for row in both), len(both)


def _line(size: str, times: list[str], ratios: list[str], algorithm: str) -> str:
    cells = [size.rjust(8), *(time.rjust(12) for time in times), *(ratio.rjust(18) for ratio in ratios)]
    return f"{''.join(cells)}  {algorithm}"


def _ratio(measured: dict[str, Measured], slow: str, fast: str) -> str:
    if slow not in measured or fast not in measured:
        return "-"
    pairs = zip(measured[slow].rounds, measured[fast].rounds, strict=True)
    return f"{statistics.median(one / other for one, other in pairs):.2f}"


def measure(
    here: Bench, contenders: list[Contender], arguments: argparse.Namespace, budget_s: float = BUDGET_S
) -> Iterator[dict[str, Measured]]:
    """Yield, for each size, the times of each contender by name. All ranks call this together.

    The contenders take turns. One further call of each, apart from memcpy, checks its result.
    """
    kind, rounds = dtype(arguments.dtype), arguments.rounds
    sizes = [0] if arguments.operation == "barrier" else arguments.sizes
    # `Buffers` rounds small sizes up to one element for each rank, so arrays may be that much longer than `sizes`.
    most = max(sizes) + here.size * kind.itemsize
    allocators = {each: symmetric(most) if each else np.empty for each in {each.symmetric for each in contenders}}
    last = -1
    for size in sizes:
        arrays = {
            key: Buffers(arguments.operation, here.rank, here.size, size, kind, arguments.op, allocate)
            for key, allocate in allocators.items()
        }
        total = arrays[contenders[0].symmetric].total_bytes
        if total == last:
            continue  # rounding to whole elements gave the previous size again
        last = total
        ways: dict[str, Way] = {}
        for name, prepare, _, in_shared in contenders:
            reset = arrays[in_shared].reset
            reset()
            call = prepare(arrays[in_shared])
            if call is not None:
                count = arguments.iterations or here.clock.enough(call, arguments.warmup, reset, budget_s, rounds)
                ways[name] = Way(call, count, reset)
        took = here.clock.take_turns(ways, rounds)
        yield {
            each.name: _checked(here, each, arrays[each.symmetric], ways[each.name].call, took[each.name])
            for each in contenders
            if each.name in ways
        }


def _checked(here: Bench, contender: Contender, buffers: Buffers, call: Call, turns: list[list[float]]) -> Measured:
    name, wrong = contender.name, None
    if name != "memcpy":
        buffers.fill()
        call()
        wrong = here.comm.allreduce(buffers.count_wrong(spoils_inputs=name == "gloo"))
    medians = [statistics.median(each) for each in turns]
    seconds = [second for each in turns for second in each]
    times = statistics.median(medians), min(seconds), max(seconds)
    algorithm = operations.algorithm_of(buffers, contender.algorithm) if name in OURS else ""
    return Measured(Point(buffers.total_bytes, buffers.count, *times, len(seconds), algorithm, wrong), medians)

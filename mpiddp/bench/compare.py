"""``bench compare``: mpiddp against plain mpi4py, memcpy, and torch on Gloo and on mpiddp, in one run.

These contenders take turns in the same processes, on arrays that are written anew before each call. A ratio of two
contenders is the median over the rounds of the ratio of their times.

The column mpi4py shows MPI's default algorithm. MPICH's release_gather is not the default; the README measures it.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

import mpiddp.distributed as dist

from . import operations
from .cli import ALL, OPERATIONS
from .job import Bench, dtype, job
from .operations import REDUCING, Buffers, Contender, bus_factor, check_reduction
from .results import Point, format_size
from .timing import BUDGET_S, Call, Way

OURS, SYMMETRIC = "mpiddp", "mpiddp symmetric"
RATIOS = (
    ("mpi4py", OURS),
    ("mpi4py", SYMMETRIC),
    (SYMMETRIC, "memcpy"),
    ("gloo", OURS),
    ("gloo", SYMMETRIC),
    ("gloo", "torch"),
)
"""Pairs of contenders. The first one's time is divided by the second one's: above 1, the second one is faster."""


_SLOWER, _SLOWER_S = 1.1, 3e-6
"""An operation counts as slower than MPI's if its time is above `_SLOWER` times MPI's time plus `_SLOWER_S` seconds."""


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison, and return the exit code: 1 if a result was wrong, else 0."""
    compared = OPERATIONS if arguments.operation == ALL else (arguments.operation,)
    for operation in compared:
        check_reduction(operation, arguments.op, dtype(arguments.dtype))
    with job(arguments) as here:
        found = [
            *(Contender(name, operations.mpiddp, symmetric=name == SYMMETRIC) for name in (OURS, SYMMETRIC)),
            Contender("mpi4py", lambda b: operations.mpi4py(b, here.comm)),
            Contender("memcpy", lambda b: operations.memcpy(b, here.comm)),
        ]
        torch = here.torch() if arguments.torch else None
        if torch is not None:
            found += torch.contenders
        for operation in compared:
            arguments.operation = operation
            here.rows += _compare(here, found, arguments)
        wrong = Counter[str]()
        for point in here.rows:
            wrong[point.name] += point.wrong or 0
        found_wrong = ", ".join(f"{name} {count} FAILED" for name, count in wrong.items() if count)
        here.say(f"# Wrong values: {found_wrong or '0 OK'}")

        slower, rows = count_slower(here.rows)
        here.say(f"# Slower than MPI in {slower} of {rows} rows: more than {_SLOWER} of mpi4py's time + 3 us")
        if torch is not None:
            torch.close()
    return int(any(wrong.values()))


def _compare(here: Bench, found: list[Contender], arguments: argparse.Namespace) -> Iterator[Point]:
    names = [each.name for each in found]
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    redop = f" {arguments.op}" * (arguments.operation in REDUCING)
    operation = f"{arguments.operation}{redop} of {arguments.dtype}"
    here.say(f"# {operation}, written anew before each call; median time of the slowest")
    here.say("# rank in us, then ratios of times")
    titles = {name: name.removeprefix("mpiddp ") for name in names}
    here.say(_line("size", titles.values(), [f"{titles[slow]}/{titles[fast]}" for slow, fast in ratios], "algorithm"))
    for measured in measure(here, found, arguments):
        yield from measured.values()
        times = [f"{measured[name].median_s * 1e6:.1f}" if name in measured else "-" for name in names]
        quotients = [_ratio(measured, *pair) for pair in ratios]
        ours = measured[OURS]
        here.say(_line(format_size(ours.size_bytes), times, quotients, ours.algorithm))


def count_slower(points: list[Point]) -> tuple[int, int]:
    """Return the number of rows in which mpiddp is slower on ordinary arrays than mpi4py, and that of rows with both.

    A row is an operation and a size.
    """
    ours, theirs = (
        {(point.operation, point.size_bytes): point.median_s for point in points if point.name == name}
        for name in (OURS, "mpi4py")
    )
    both = ours.keys() & theirs.keys()
    return sum(ours[row] > _SLOWER * theirs[row] + _SLOWER_S for row in both), len(both)


def _line(size: str, times: Iterable[str], ratios: list[str], algorithm: str) -> str:
    cells = [size.rjust(8), *(time.rjust(12) for time in times), *(ratio.rjust(18) for ratio in ratios)]
    return f"{''.join(cells)}  {algorithm}"


def _ratio(measured: dict[str, Point], slow: str, fast: str) -> str:
    if slow not in measured or fast not in measured:
        return "-"
    pairs = zip(measured[slow].rounds_s, measured[fast].rounds_s, strict=True)
    return f"{statistics.median(one / other for one, other in pairs):.2f}"


def measure(
    here: Bench, contenders: list[Contender], arguments: argparse.Namespace, budget_s: float = BUDGET_S
) -> Iterator[dict[str, Point]]:
    """Yield, for each size, the times of each contender by name. All ranks call this together.

    The contenders take turns. One further call of each, apart from memcpy, checks its result.
    """
    kind, rounds = dtype(arguments.dtype), arguments.rounds
    sizes = [0] if arguments.operation == "barrier" else arguments.sizes
    allocators = {each.symmetric: dist.symmetric_empty if each.symmetric else np.empty for each in contenders}
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


def _checked(here: Bench, contender: Contender, b: Buffers, call: Call, turns: list[list[float]]) -> Point:
    name, wrong = contender.name, None
    if name != "memcpy":
        b.fill()
        call()
        wrong = here.comm.allreduce(b.count_wrong(spoils_inputs=name == "gloo"))
    medians = [statistics.median(each) for each in turns]
    seconds = [second for each in turns for second in each]
    median, op = statistics.median(medians), b.op if b.operation in REDUCING else "none"
    rate = b.total_bytes / median * bus_factor(b.operation, here.size)
    algorithm = operations.algorithm_of(b, contender.algorithm) if name.startswith(OURS) else ""
    what = name, b.operation, b.dtype.name, op, here.size, b.total_bytes, b.count
    return Point(*what, median, min(seconds), max(seconds), medians, len(seconds), rate, algorithm, wrong)

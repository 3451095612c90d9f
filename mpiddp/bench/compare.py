"""``bench compare``: mpiddp beside plain mpi4py, one copy of the bytes, and torch on Gloo and on mpiddp, in one run.

All take turns in the same processes, on arrays written anew before each call. A ratio is the median of the rounds'
ratios.

mpi4py's column is MPI's default algorithm; for MPICH's release_gather see the README.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from . import operations
from .cli import ALL, OPERATIONS
from .job import Bench, dtype, job, symmetric
from .operations import REDUCING, Buffers, Contender, check_reduction, new_series
from .results import Point, Series, format_size
from .timing import Way

_ROUND_S = 0.02
_FEWEST = 3
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
"""Pairs of times that are divided: above 1, the second is faster."""


_SLOWER, _SLOWER_S = 1.1, 3e-6
"""An operation counts as slower than MPI's if it takes more than so many times MPI's time, and so many seconds."""


class Measured(NamedTuple):
    point: Point
    rounds: list[float]


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result was wrong."""
    kind = dtype(arguments.dtype)
    compared = OPERATIONS if arguments.operation == ALL else (arguments.operation,)
    for operation in compared:
        check_reduction(operation, arguments.op, kind)
    with job() as here:
        here.describe()
        found = [
            *(Contender(name, operations.mpiddp) for name in OURS),
            Contender("mpi4py", lambda b: operations.mpi4py(b, here.comm)),
            Contender("memcpy", lambda b: operations.memcpy(b, here.comm)),
        ]
        torch = here.torch() if arguments.torch else None
        if torch is not None:
            found += torch.contenders
        series = []
        for operation in compared:
            arguments.operation = operation
            series += _compare(here, found, arguments, kind)
        wrong = dict.fromkeys((each.name for each in series), 0)
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


def _compare(here: Bench, found: list[Contender], arguments: argparse.Namespace, kind: np.dtype[Any]) -> list[Series]:
    operation = arguments.operation
    swept = [0] if operation == "barrier" else arguments.sizes
    shared = symmetric(max(swept) + here.size * kind.itemsize)
    names = [each.name for each in found]
    titles = [f"mpiddp {SYMMETRIC}" * (name == SYMMETRIC) or name for name in names]
    series = {name: new_series(title, here.size, arguments) for name, title in zip(names, titles, strict=True)}
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    redop = f" {arguments.op}" * (operation in REDUCING)
    here.say(f"# {operation}{redop} of {arguments.dtype}, written anew before each call; median time of the slowest")
    here.say("# rank in us, then ratios of times")
    here.say(_line("size", names, [f"{slow}/{fast}" for slow, fast in ratios], "algorithm"))
    last = -1
    for size in swept:
        plain = Buffers(operation, here.rank, here.size, size, kind, arguments.op)
        if plain.total_bytes == last:
            continue
        last = plain.total_bytes
        there = Buffers(operation, here.rank, here.size, size, kind, arguments.op, shared)
        entered = [(each, there if each.name == SYMMETRIC else plain) for each in found]
        measured = measure(here, entered, arguments, arguments.rounds)
        for name, each in measured.items():
            series[name].points.append(each.point)
        times = [f"{measured[name].point.median_s * 1e6:.1f}" if name in measured else "-" for name in names]
        quotients = [_ratio(measured, *pair) for pair in ratios]
        here.say(_line(format_size(last), times, quotients, measured["mpiddp"].point.algorithm))
    return [each for each in series.values() if each.points]


def count_slower(series: list[Series]) -> tuple[int, int]:
    """Return in how many rows mpiddp is slower on ordinary arrays than mpi4py, and how many rows have both."""
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
    here: Bench,
    entered: list[tuple[Contender, Buffers]],
    arguments: argparse.Namespace,
    rounds: int,
    budget_s: float = _ROUND_S,
    fewest: int = _FEWEST,
) -> dict[str, Measured]:
    """Let the contenders take turns on their buffers, and check their results."""
    ways: dict[str, Way] = {}
    for (name, prepare, _), buffers in entered:
        buffers.reset()
        call = prepare(buffers)
        if call is not None:
            count = arguments.iterations or here.clock.enough(call, arguments.warmup, buffers.reset, budget_s, fewest)
            ways[name] = Way(call, count, buffers.reset)
    took = here.clock.take_turns(ways, rounds)
    found = {}
    for (name, _, asked), buffers in entered:
        if name not in ways:
            continue
        wrong = None
        if name != "memcpy":
            buffers.fill()
            ways[name].call()
            wrong = here.comm.allreduce(buffers.count_wrong(spoils_inputs=name == "gloo"))
        medians = [statistics.median(each) for each in took[name]]
        seconds = [second for each in took[name] for second in each]
        times = statistics.median(medians), min(seconds), max(seconds)
        algorithm = operations.algorithm_of(buffers, asked) if name in OURS else ""
        point = Point(buffers.total_bytes, buffers.count, *times, len(seconds), algorithm, wrong)
        found[name] = Measured(point, medians)
    return found

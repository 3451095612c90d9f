"""``bench compare``: mpiddp beside plain mpi4py, one copy of the bytes, and Gloo, in one run.

All work on the same arrays in the same processes and take turns, round after round, so that whatever else the machine
does meets all of them alike. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import numpy as np

from mpiddp.mpi.reduction import check
from mpiddp.training.config import UsageError

from . import load, results, sizes
from .buffers import REDUCING, Buffers, bus_factor
from .contenders import Contender, Memcpy, Mpi4py, Mpiddp, reduce_op
from .job import Job, dtype, header, job, ordinary, symmetric
from .results import Point, Series
from .timing import Times

_ROUND_S = 0.02
_FEWEST = 3
SYMMETRIC = "symmetric"
RATIOS = (
    ("mpi4py", "mpiddp"),
    ("mpi4py", SYMMETRIC),
    (SYMMETRIC, "memcpy"),
    ("gloo", "mpiddp"),
    ("gloo", SYMMETRIC),
)
"""Which times are divided by which: above 1, the second is faster."""


class Measured(NamedTuple):
    """A contender at one size: its points, and its median time in each round in seconds."""

    point: Point
    rounds: list[float]


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit code: 1 if a result was wrong."""
    kind, operation = dtype(arguments.dtype), arguments.operation
    if operation in REDUCING:
        try:
            check(kind, reduce_op(arguments.op))
        except TypeError as error:
            raise UsageError(f"--op {arguments.op} --dtype {arguments.dtype}: {error}") from None
    with job() as here:
        environment = here.environment()
        here.say(header(environment))
        found: list[Contender] = [Mpiddp(), Mpiddp(SYMMETRIC), Mpi4py(here.comm), Memcpy(here.comm)]
        gloo = _gloo(here) if arguments.gloo else None
        if gloo is not None:
            found.append(gloo)
        series = _compare(here, found, arguments, kind)
        wrong = {each.name: sum(point.wrong or 0 for point in each.points) for each in series}
        found_wrong = ", ".join(f"{name} {count} FAILED" for name, count in wrong.items() if count)
        here.say(f"# Wrong values: {found_wrong or '0 OK'}")
        if gloo is not None:
            gloo.close()
        if arguments.json:
            here.together(lambda: results.write(arguments.json, "compare", environment, series))
    return int(any(wrong.values()))


def _gloo(here: Job) -> Any:
    """Return Gloo, or say why it is left out."""
    fault = None
    try:
        module = load("mpiddp.bench.gloo")
    except ImportError as error:
        fault = str(error)
    fault = next(filter(None, here.comm.allgather(fault)), None)
    if fault:
        here.say(f"# Gloo is left out: {fault}; pip install torch")
        return None
    return module.Gloo(here)


def _compare(here: Job, found: list[Contender], arguments: argparse.Namespace, kind: np.dtype[Any]) -> list[Series]:
    """Measure all contenders at all sizes and print a line for each size."""
    operation = arguments.operation
    swept = [0] if operation == "barrier" else arguments.sizes
    shared = symmetric(max(swept) + here.size * kind.itemsize)
    op = arguments.op if operation in REDUCING else "none"
    series = {
        each.name: Series(
            f"mpiddp {SYMMETRIC}" * (each.name == SYMMETRIC) or each.name,
            operation,
            arguments.dtype,
            op,
            here.size,
            bus_factor(operation, here.size),
            [],
        )
        for each in found
    }
    names = list(series)
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    redop = f" {op}" * (operation in REDUCING)
    here.say(f"# {operation}{redop} of {arguments.dtype}; median time of the slowest rank in us, then ratios of times")
    here.say(_line("size", names, [f"{slow}/{fast}" for slow, fast in ratios], "algorithm"))
    last = -1
    for size in swept:
        plain = Buffers(operation, here.rank, here.size, size, kind, arguments.op, ordinary)
        if plain.total_bytes == last:
            continue
        last = plain.total_bytes
        there = Buffers(operation, here.rank, here.size, size, kind, arguments.op, shared)
        measured = _measure(here, [(each, there if each.name == SYMMETRIC else plain) for each in found], arguments)
        for name, each in measured.items():
            series[name].points.append(each.point)
        times = [f"{measured[name].point.median_s * 1e6:.1f}" if name in measured else "-" for name in names]
        quotients = [_ratio(measured, *pair) for pair in ratios]
        here.say(_line(sizes.text(last), times, quotients, measured["mpiddp"].point.algorithm))
    return [each for each in series.values() if each.points]


def _line(size: str, times: list[str], ratios: list[str], algorithm: str) -> str:
    return (
        size.rjust(8)
        + "".join(cell.rjust(12) for cell in times)
        + "".join(cell.rjust(18) for cell in ratios)
        + (f"  {algorithm}")
    )


def _ratio(measured: dict[str, Measured], slow: str, fast: str) -> str:
    """Return how many times as long one takes as another."""
    if slow not in measured or fast not in measured:
        return "-"
    pairs = zip(measured[slow].rounds, measured[fast].rounds, strict=True)
    return f"{statistics.median(one / other for one, other in pairs):.2f}"


def _measure(here: Job, entered: list[tuple[Contender, Buffers]], arguments: argparse.Namespace) -> dict[str, Measured]:
    """Let all take turns at one size, then check what each of them gives."""
    calls = []
    for contender, buffers in entered:
        buffers.rest()
        call = contender.prepare(buffers)
        if call is not None:
            count = arguments.iterations or here.clock.enough(call, arguments.warmup, _ROUND_S, _FEWEST)
            calls.append((contender, buffers, call, count))
    seconds: dict[str, list[list[float]]] = {contender.name: [] for contender, *_ in calls}
    for _ in range(arguments.rounds):
        for contender, _, call, count in calls:
            call()  # brings its code and data back into the cache
            seconds[contender.name].append(here.clock.each(call, count))
    found = {}
    for contender, buffers, call, _ in calls:
        wrong = None
        if contender.name != "memcpy":
            buffers.fill()
            call()
            wrong = here.sum(buffers.count_wrong(spoils_inputs=contender.name == "gloo"))
        rounds = [statistics.median(each) for each in seconds[contender.name]]
        times = Times.of([second for each in seconds[contender.name] for second in each])
        point = Point(
            buffers.total_bytes,
            buffers.count,
            statistics.median(rounds),
            times.min,
            times.max,
            times.iterations,
            contender.algorithm(buffers),
            wrong,
        )
        found[contender.name] = Measured(point, rounds)
    return found

"""``bench OPERATION``: time and bandwidth of one operation against size, in the columns of nccl-tests."""

from __future__ import annotations

import argparse

import numpy as np

from mpiddp.training.options import refusing

from . import operations
from .compare import measure
from .job import dtype, job, symmetric
from .operations import ROOTED, Buffers, Contender, check_reduction, new_series
from .results import Point, Series
from .timing import BUDGET_S, FEWEST

_HEAD = (
    "#       size       count       type    redop  root       time        min        max    algbw    busbw  #wrong"
    "        algorithm\n"
    "#        (B)  (elements)                                 (us)       (us)       (us)   (GB/s)   (GB/s)"
)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result was wrong."""
    kind = dtype(arguments.dtype)
    operation = arguments.operation
    check_reduction(operation, arguments.op, kind)
    sizes = [0] if operation == "barrier" else arguments.sizes
    with job() as here:
        here.describe()
        here.say("# arrays are written anew before each call; times of the slowest rank")
        here.say(_HEAD)
        # Small sizes are rounded up to one element for each rank.
        allocate = symmetric(max(sizes) + here.size * kind.itemsize) if arguments.symmetric else np.empty
        asked = None if arguments.algorithm == "auto" else arguments.algorithm
        name = "mpiddp" + " symmetric" * arguments.symmetric + f" {asked}" * (asked is not None)
        series = new_series(name, here.size, arguments)
        contender = Contender("mpiddp", lambda b: operations.mpiddp(b, asked), asked)
        points = series.points
        with refusing(f"--algorithm {arguments.algorithm}: ", ValueError):
            for size in sizes:
                buffers = Buffers(operation, here.rank, here.size, size, kind, arguments.op, allocate)
                if points and points[-1].size_bytes == buffers.total_bytes:
                    continue  # both are less than one element for each rank
                entered = [(contender, buffers)]
                points.append(measure(here, entered, arguments, 1, BUDGET_S, FEWEST)["mpiddp"].point)
                here.say(_row(series, points[-1]))
        here.say(_footer(series))
        here.write(arguments.json, "sweep", [series])
    return int(any(point.wrong for point in points))


def _row(series: Series, point: Point) -> str:
    root = 0 if series.operation in ROOTED else -1
    algorithm, bus = series.algorithm_bandwidth(point) / 1e9, series.bus_bandwidth(point) / 1e9
    return (
        f"{point.size_bytes:12}{point.count:12}{series.dtype:>11}{series.op:>9}{root:6}"
        f"{point.median_s * 1e6:11.2f}{point.min_s * 1e6:11.2f}{point.max_s * 1e6:11.2f}"
        f"{algorithm:9.2f}{bus:9.2f}{point.wrong!s:>8}{point.algorithm:>17}"
    )


def _footer(series: Series) -> str:
    wrong = sum(point.wrong or 0 for point in series.points)
    average = sum(series.bus_bandwidth(point) for point in series.points) / len(series.points)
    verdict = f"# Wrong values       : {wrong} {'FAILED' if wrong else 'OK'}"
    return f"{verdict}\n# Avg bus bandwidth  : {average / 1e9:.4g} GB/s"

"""``bench OPERATION``: time and bandwidth of one operation against size, in the columns of nccl-tests."""

import argparse

from mpiddp.training.options import refusing

from . import operations
from .compare import measure
from .job import dtype, job
from .operations import ROOTED, Contender, check_reduction, new_series
from .results import Point, Series

_HEAD = (
    "#       size       count       type    redop  root       time        min        max    algbw    busbw  #wrong"
    "        algorithm\n"
    "#        (B)  (elements)                                 (us)       (us)       (us)   (GB/s)   (GB/s)"
)


def run(arguments: argparse.Namespace) -> int:
    """Measure one operation at all sizes, and return the exit code: 1 if a result was wrong, else 0."""
    check_reduction(arguments.operation, arguments.op, dtype(arguments.dtype))
    with job() as here:
        here.describe()
        here.say("# arrays are written anew before each call; times of the slowest rank")
        here.say(_HEAD)
        asked = None if arguments.algorithm == "auto" else arguments.algorithm
        name = "mpiddp" + " symmetric" * arguments.symmetric + f" {asked}" * (asked is not None)
        series = new_series(name, here.size, arguments)
        contender = Contender("mpiddp", lambda b: operations.mpiddp(b, asked), asked, bool(arguments.symmetric))
        with refusing(f"--algorithm {arguments.algorithm}: ", ValueError):
            for measured in measure(here, [contender], arguments):
                series.points.append(measured["mpiddp"].point)
                here.say(_row(series, series.points[-1]))
        here.say(_footer(series))
        here.write(arguments.json, "sweep", [series])
    return int(any(point.wrong for point in series.points))


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

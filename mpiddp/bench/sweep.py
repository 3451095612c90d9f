"""``bench OPERATION``: time and bandwidth of one operation against size, in the columns of nccl-tests."""

import argparse
import statistics

from mpiddp.training.options import refusing

from . import operations
from .compare import measure
from .job import dtype, job
from .operations import ROOTED, Contender, check_reduction
from .results import Point

_HEAD = (
    "#       size       count       type    redop  root       time        min        max    algbw    busbw  #wrong"
    "        algorithm\n"
    "#        (B)  (elements)                                 (us)       (us)       (us)   (GB/s)   (GB/s)"
)


def run(arguments: argparse.Namespace) -> int:
    """Measure one operation at all sizes, and return the exit code: 1 if a result was wrong, else 0."""
    check_reduction(arguments.operation, arguments.op, dtype(arguments.dtype))
    with job(arguments) as here:
        here.say("# arrays are written anew before each call; times of the slowest rank")
        here.say(_HEAD)
        asked = None if arguments.algorithm == "auto" else arguments.algorithm
        name = "mpiddp" + " symmetric" * arguments.symmetric + f" {asked}" * (asked is not None)
        contender = Contender(name, lambda b: operations.mpiddp(b, asked), asked, bool(arguments.symmetric))
        with refusing(f"--algorithm {arguments.algorithm}: ", ValueError):
            for measured in measure(here, [contender], arguments):
                here.rows += measured.values()
                here.say(_row(here.rows[-1]))
        here.say(_footer(here.rows))
    return int(any(point.wrong for point in here.rows))


def _row(point: Point) -> str:
    root = 0 if point.operation in ROOTED else -1
    rates = point.size_bytes / point.median_s / 1e9, point.bus_bandwidth / 1e9
    return (
        f"{point.size_bytes:12}{point.count:12}{point.dtype:>11}{point.op:>9}{root:6}"
        f"{point.median_s * 1e6:11.2f}{point.min_s * 1e6:11.2f}{point.max_s * 1e6:11.2f}"
        f"{rates[0]:9.2f}{rates[1]:9.2f}{point.wrong!s:>8}{point.algorithm:>17}"
    )


def _footer(points: list[Point]) -> str:
    wrong = sum(point.wrong or 0 for point in points)
    average = statistics.mean(point.bus_bandwidth for point in points)
    verdict = f"# Wrong values       : {wrong} {'FAILED' if wrong else 'OK'}"
    return f"{verdict}\n# Avg bus bandwidth  : {average / 1e9:.4g} GB/s"

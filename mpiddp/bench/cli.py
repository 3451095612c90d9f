"""The options of ``python -m mpiddp bench`` and ``plot``; the standard library only, until a command runs.

A benchmark is a row of `COMMANDS` and a module with ``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.cores import limit_blas_threads
from mpiddp.training.config import UsageError

from .results import parse_size, size_range

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "send_recv", "barrier"),
)

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int8", "uint8", "int16", "int32", "int64", "uint64", "bool"),
)


class Command(NamedTuple):
    name: str
    """Of its module, too."""
    summary: str
    options: Callable[[argparse.ArgumentParser], None]


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return found


def _rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="rounds in which all take turns (5)")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file, for plot")


def _sizes(parser: argparse.ArgumentParser, begin: str, end: str, factor: float) -> None:
    parser.add_argument("-b", "--begin", type=size, default=size(begin), metavar="SIZE", help=f"smallest ({begin})")
    parser.add_argument("-e", "--end", type=size, default=size(end), metavar="SIZE", help=f"largest ({end})")
    parser.add_argument("-f", "--factor", type=float, default=factor, help=f"from one size to the next ({factor:g})")


def _sweep(parser: argparse.ArgumentParser, factor: float) -> None:
    _sizes(parser, "8", "64M", factor)
    parser.add_argument(
        "-n",
        "--iterations",
        type=positive,
        metavar="N",
        help="iterations of each size (as many as fit into a short time)",
    )
    parser.add_argument("-w", "--warmup", type=natural, default=5, metavar="N", help="iterations before these (5)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", metavar="DTYPE", help=", ".join(DTYPES))
    parser.add_argument("--op", choices=REDUCTIONS, default="sum", metavar="OP", help=", ".join(REDUCTIONS))


def _operation(parser: argparse.ArgumentParser) -> None:
    _sweep(parser, 2)
    parser.add_argument(
        "-c", "--check", type=int, choices=(0, 1), default=1, help="check the result of each size (1) or not (0)"
    )
    parser.add_argument(
        "--algorithm", default="auto", metavar="NAME", help="auto, or one for all sizes, such as native, two_shot, ring"
    )
    parser.add_argument("--symmetric", action="store_true", help="arrays in memory that the ranks of a node share")
    _json(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operation",
        nargs="?",
        choices=OPERATIONS,
        default="all_reduce",
        metavar="OPERATION",
        help=", ".join(OPERATIONS),
    )
    _sweep(parser, 8)
    _rounds(parser)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="without torch, and with it Gloo")
    _json(parser)


def _overlap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=size, default=size("64M"), metavar="SIZE", help="all gradients together (64M)")
    parser.add_argument("--buckets", type=positive, default=16, metavar="N", help="1 to so many buckets, doubling (16)")
    parser.add_argument("--layers", type=positive, default=64, metavar="N", help="pieces of the computation (64)")
    parser.add_argument("--compute", type=seconds, metavar="SECONDS", help="of computation (as long as communication)")
    _rounds(parser)
    parser.add_argument("--no-symmetric", dest="symmetric", action="store_false", help="buckets in ordinary memory")
    _json(parser)


def _tune(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, "1K", "16M", 4)
    _rounds(parser)


def _ddp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, default=64, metavar="N", help="samples a rank (64)")
    parser.add_argument("-n", "--iterations", type=positive, default=10, metavar="N", help="steps of a turn (10)")
    _rounds(parser)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="without torch")
    _json(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strong-batch", type=positive, default=256, metavar="N", help="samples of all ranks (256)")
    parser.add_argument("--weak-batch", type=positive, default=64, metavar="N", help="samples of each rank (64)")
    parser.add_argument("-n", "--iterations", type=positive, default=5, metavar="N", help="steps of a turn (5)")
    _rounds(parser)
    _json(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of a benchmark's --json; or folders of `train --output`, to compare",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("plot.png"), metavar="PICTURE", help="a .png or .svg (plot.png)"
    )


COMMANDS = (
    Command("compare", "mpiddp, plain mpi4py, one copy of the bytes and torch, in turns", _compare),
    Command("overlap", "the share of communication that hides behind computation", _overlap),
    Command("ddp", "training steps: alone, with averaged gradients, and torch's", _ddp),
    Command("train", "strong and weak scaling of the main job from 1 rank to all", _train),
    Command("tune", "the MPIDDP_ALGORITHM that is faster than the built-in table", _tune),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure operations, compare, tune",
        description="Measure mpiddp's operations. Start it with mpirun -np 4 python -m mpiddp bench all_reduce.",
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for name in OPERATIONS:
        operation = kinds.add_parser(
            name,
            help=f"time and bandwidth of {name} against size",
            description="Columns and bandwidths as in nccl-tests; time is the slowest rank's, median over iterations.",
        )
        _operation(operation)
        operation.set_defaults(run=_run, module="sweep", operation=name)
    for command in COMMANDS:
        found = kinds.add_parser(command.name, help=command.summary, description=f"Measure: {command.summary}.")
        command.options(found)
        found.set_defaults(run=_run, module=command.name)
    plot = commands.add_parser(
        "plot",
        help="draw results of benchmarks and training runs",
        description="Draw latency and bus bandwidth against size, or the scaling of training, from benchmarks' --json"
        " files; or loss, accuracy and throughput from folders of training runs.",
    )
    _plot(plot)
    plot.set_defaults(run=_run, module="plot")


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(arguments, "factor"):
        try:
            arguments.sizes = size_range(arguments.begin, arguments.end, arguments.factor)
        except ValueError as error:
            raise UsageError(str(error)) from None
    limit_blas_threads()
    code: int = importlib.import_module(f"mpiddp.bench.{arguments.module}").run(arguments)
    return code

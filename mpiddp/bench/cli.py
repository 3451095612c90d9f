"""The options of ``python -m mpiddp bench`` and ``plot``. NumPy is imported only when a command runs.

Each benchmark has an entry in `COMMANDS` and a module of the same name, whose ``run(arguments)`` returns the exit code.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.cores import limit_blas_threads

from .results import parse_size, size_range

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "all_gather_list", "all_to_all_list", "send_recv"),
    *("batch_isend_irecv", "ping_pong", "all_reduce_async", "barrier"),
)
ALL = "all"

REDUCTIONS = ("sum", "exact_sum", "avg", "min", "max")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


_METAVARS: dict[Any, str] = {parse_size: "SIZE", positive: "N", int: "N", Path: "FILE"}

# For each option: its flags, its type, its default and its help. The type is a tuple of choices, a function that reads
# the text, or, for a flag without a value, the bool that the flag sets.
_OPTIONS: dict[str, tuple[str, Any, Any, str]] = {
    "begin": ("-b --begin", parse_size, "8", "smallest size"),
    "end": ("-e --end", parse_size, "64M", "largest size"),
    "factor": ("-f --factor", float, 2, "from one size to the next"),
    "iterations": ("-n --iterations", positive, None, "measured iterations (as many as fit into a short time)"),
    "steps": ("-n --iterations", positive, 10, "steps of a turn"),
    "warmup": ("-w --warmup", int, 5, "iterations before these"),
    "dtype": ("--dtype", DTYPES, "float32", ", ".join(DTYPES)),
    "op": ("--op", REDUCTIONS, "sum", ", ".join(REDUCTIONS)),
    "operation": ("operation", (*OPERATIONS, ALL), "all_reduce", f"{', '.join(OPERATIONS)}, or {ALL} of them"),
    "algorithm": ("--algorithm", str, "auto", "one for all sizes, such as native, two_shot, ring"),
    "symmetric": ("--symmetric", True, None, "arrays in memory that the ranks of a node share"),
    "rounds": ("--rounds", positive, 5, "rounds in which all take turns"),
    "torch": ("--no-torch", False, None, "without torch, and with it Gloo"),
    "batch": ("--batch", positive, 64, "samples a rank"),
    "strong": ("--strong-batch", positive, 256, "samples of all ranks"),
    "weak": ("--weak-batch", positive, 64, "samples of each rank"),
    "json": ("--json", Path, None, "write the result to this file, for plot"),
}
_SWEEP = "begin end factor iterations warmup dtype op"


class Command(NamedTuple):
    summary: str
    options: str
    """Names of the command's options in `_OPTIONS`, separated by spaces."""
    defaults: dict[str, Any]
    """Defaults that differ from those in `_OPTIONS`, and fixed values of options that the command does not offer."""


COMMANDS = {
    "compare": Command(
        "mpiddp, plain mpi4py, one copy of the bytes and torch, in turns",
        f"operation {_SWEEP} rounds torch json",
        {"factor": 8},
    ),
    "ddp": Command("training steps: alone, with averaged gradients, and torch's", "batch steps rounds torch json", {}),
    "train": Command(
        "strong and weak scaling of the main job from 1 rank to all", "strong weak steps rounds json", {"iterations": 5}
    ),
    "tune": Command(
        "the MPIDDP_ALGORITHM that is faster than the built-in table",
        "begin end factor rounds",
        {"begin": "1K", "end": "16M", "factor": 4, "dtype": "float32", "op": "sum", "iterations": None, "warmup": 2}
        | {"json": None},
    ),
}


def _add_options(parser: argparse.ArgumentParser, names: str, defaults: dict[str, Any]) -> None:
    for name in names.split():
        flags, kind, default, text = _OPTIONS[name]
        if isinstance(kind, bool):
            destination = flags.removeprefix("--no-").removeprefix("--")
            parser.add_argument(flags, dest=destination, action=f"store_{kind}".lower(), help=text)
            continue
        how: dict[str, Any] = {"type": kind}
        if isinstance(kind, tuple):
            how = {"choices": kind, "metavar": name.upper()}
        how |= {"metavar": _METAVARS[kind]} if kind in _METAVARS else {}
        how |= {"nargs": "?"} if name == flags else {}
        shown = text if default is None else f"{text} (%(default)s)"
        parser.add_argument(*flags.split(), default=default, help=shown, **how)
    parser.set_defaults(**defaults)


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
        _add_options(operation, f"{_SWEEP} algorithm symmetric json", {"rounds": 1})
        operation.set_defaults(run=_run, module="sweep", operation=name)
    for name, command in COMMANDS.items():
        found = kinds.add_parser(name, help=command.summary, description=f"Measure: {command.summary}.")
        _add_options(found, command.options, command.defaults)
        found.set_defaults(run=_run, module=name)
    plot = commands.add_parser(
        "plot",
        help="draw results of benchmarks",
        description="Draw latency and bandwidth against size, or steps and the scaling of training, from --json files.",
    )
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files of a benchmark's --json")
    plot.add_argument(
        "-o", "--output", type=Path, default=Path("plot.png"), metavar="PICTURE", help="a .png or .svg (plot.png)"
    )
    plot.set_defaults(run=_run, module="plot")


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(arguments, "factor"):
        arguments.sizes = size_range(arguments.begin, arguments.end, arguments.factor)
    limit_blas_threads()
    return importlib.import_module(f"mpiddp.bench.{arguments.module}").run(arguments)  # type: ignore[no-any-return]

"""Results of benchmarks: sizes in bytes, measured points, and the JSON files that hold them.

The module imports only the standard library and `UsageError`, so that the command line and `plot` need no MPI.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpiddp.training.options import UsageError

FORMAT = "mpiddp-bench/2"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Read a size in bytes: an integer, or a number with K, M or G (powers of 1,024).

    ArgumentTypeError if the text is not such a size.

    >>> parse_size("8"), parse_size("1.5K"), parse_size("128M")
    (8, 1536, 134217728)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(f"a size is a number of bytes such as 8, 64K, 1.5M or 2G, got {text!r}")
    return int(size)


def format_size(size_bytes: float) -> str:
    """Write a size with the largest of the units G, M and K that divides it.

    If none divides it, a size below 10,000 is written in bytes, and a larger one is rounded to one decimal of a unit.

    >>> format_size(8), format_size(65536), format_size(1000), format_size(1_500_000)
    ('8', '64K', '1000', '1.4M')
    """
    whole = next((unit for unit in "GMK" if size_bytes and size_bytes % _UNITS[unit] == 0), "")
    if whole or size_bytes < 10_000:
        return f"{size_bytes / _UNITS[whole]:.0f}{whole}"
    unit = next(unit for unit in "GMK" if size_bytes >= _UNITS[unit])
    return f"{size_bytes / _UNITS[unit]:.1f}{unit}"


def size_range(begin: int, end: int, factor: float) -> list[int]:
    """List the sizes from ``begin`` to ``end``, each ``factor`` times its predecessor; UsageError if there are none.

    >>> size_range(8, 100, 2)
    [8, 16, 32, 64]
    """
    if factor <= 1:
        raise UsageError(f"the factor between sizes (-f) has to be larger than 1, got {factor:g}")
    if begin > end:
        raise UsageError(f"sizes begin (-b) at {format_size(begin)} bytes, beyond their end (-e) at {format_size(end)}")
    found: list[int] = []
    size = float(begin)
    while size <= end:
        if not found or int(size) > found[-1]:
            found.append(int(size))
        size *= factor
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """The measured times of a contender's operation at one size, in seconds: a row of a result file."""

    name: str
    """The name of the contender."""
    operation: str
    dtype: str
    op: str
    ranks: int
    size_bytes: int
    count: int
    median_s: float
    min_s: float
    max_s: float
    rounds_s: list[float]
    """The median time of each round."""
    iterations: int
    bus_bandwidth: float
    """The bandwidth of the busiest link in bytes per second."""
    algorithm: str = ""
    wrong: int | None = None
    """Number of wrong elements in the results of all ranks; None if the results were not checked."""


def write(path: Path, kind: str, environment: dict[str, Any], rows: Sequence[Point | dict[str, Any]]) -> None:
    """Write a result file, completely or not at all."""
    document = {"format": FORMAT, "kind": kind, "environment": environment, "rows": rows}
    from mpiddp.serialization import write_atomically  # `serialization` imports NumPy

    try:
        write_atomically(path, (json.dumps(document, indent=1, default=dataclasses.asdict) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error

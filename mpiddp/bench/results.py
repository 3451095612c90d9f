"""What benchmarks write down: series of points, and the machine that they were measured on; as a JSON file.

Imports the standard library and mpiddp's own description of the job only, so that `plot` and `model` read such files
anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mpiddp.training.config import UsageError

FORMAT = "mpiddp-bench/1"


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of a series. Times are in seconds, bandwidths in bytes a second."""

    size_bytes: int
    count: int
    median_s: float
    min_s: float
    max_s: float
    iterations: int
    algorithm: str = ""
    wrong: int | None = None
    """Wrong elements on all ranks; None where nobody looked."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One contender doing one operation over a range of sizes."""

    name: str
    operation: str
    dtype: str
    op: str
    ranks: int
    bus_factor: float
    points: list[Point]

    def algorithm_bandwidth(self, point: Point) -> float:
        """Return S / t in bytes a second."""
        return point.size_bytes / point.median_s

    def bus_bandwidth(self, point: Point) -> float:
        """Return the bus bandwidth in bytes a second (see `buffers.bus_factor`)."""
        return self.algorithm_bandwidth(point) * self.bus_factor


def write(path: Path, kind: str, environment: dict[str, Any], series: list[Series], **more: Any) -> None:
    """Write a benchmark's result, whole or not at all.

    Parameters
    ----------
    path : Path
        The file.
    kind : str
        The command that made it.
    environment : dict
        See `job.environment`.
    series : list of Series
        What was measured.
    **more
        What only this command has.
    """
    document = {"format": FORMAT, "kind": kind, "environment": environment, **more}
    document["series"] = [dataclasses.asdict(each) for each in series]
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(document, indent=1) + "\n")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> tuple[dict[str, Any], list[Series]]:
    """Read what `write` wrote: the whole document, and its series.

    Raises
    ------
    UsageError
        If the file cannot be read, or is another one.
    """
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise UsageError(f"{path} has the format {document['format']!r}, this version reads {FORMAT!r}")
        series = [
            Series(**{**each, "points": [Point(**point) for point in each["points"]]}) for each in document["series"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what a benchmark writes with --json FILE ({error!r})") from error
    return document, series

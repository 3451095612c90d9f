"""``plot``: pictures of what benchmarks and training runs have left. Needs no MPI, and matplotlib for the drawing."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.config import UsageError

from . import load, results, runs, sizes
from .panels import panels as read_panels
from .results import Series

_LEAD = 1.05
"""So many times faster is really faster: less may be chance."""


class Crossover(NamedTuple):
    """Where another series becomes the fastest."""

    size_bytes: float
    seconds: float
    before: str
    after: str


def run(arguments: argparse.Namespace) -> int:
    """Draw, say where crossovers are, and return the exit code."""
    if arguments.output.suffix not in (".png", ".svg"):
        raise UsageError(f"--output has to end with .png or .svg, got {arguments.output}")
    panels: dict[str, list[Series]] = {}
    if any(path.is_dir() for path in arguments.files):
        trained = runs.read_runs(arguments.files)
        print(runs.table(trained))
        _draw("run_chart", "draw_runs", trained, arguments.output)
    elif scaling := scaling_rows(arguments.files):
        _draw("chart", "draw_scaling", scaling, arguments.output)
    elif diagrams := read_panels(arguments.files):
        _draw("chart", "draw_panels", diagrams, arguments.output)
    else:
        panels = group_series(arguments.files)
        _draw("chart", "draw", panels, arguments.output)
    for title, drawn in panels.items():
        for each in crossovers(drawn):
            print(f"{title}: {each.after} overtakes {each.before} at {sizes.text(int(each.size_bytes))}")
    print(f"wrote {arguments.output}")
    return 0


def _draw(module: str, function: str, what: Any, path: Path) -> None:
    """Call a function of a module that needs matplotlib."""
    try:
        chart = load(f"mpiddp.bench.{module}")
    except ImportError as error:
        raise UsageError(f"plot needs matplotlib ({error}): pip install 'mpiddp[plot]'") from None
    try:
        getattr(chart, function)(what, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def scaling_rows(files: list[Path]) -> dict[str, dict[int, float]]:
    """Return samples a second by ranks, for each network and kind of scaling, from files of `bench train`.

    Raises
    ------
    UsageError
        If only some of the files are of this kind.
    """
    documents = [results.read(file)[0] for file in files]
    of_training = [each for each in documents if each["kind"] == "train"]
    if of_training and len(of_training) < len(documents):
        raise UsageError("files of `bench train` and of other benchmarks make no common picture: draw them apart")
    found: dict[str, dict[int, float]] = {}
    for row in (row for each in of_training for row in each["rows"]):
        found.setdefault(f"{row['network']}, {row['scaling']}", {})[row["ranks"]] = row["samples_per_s"]
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def group_series(files: list[Path]) -> dict[str, list[Series]]:
    """Read files and return their series by what can be compared: the same operation on as many ranks.

    Series of one name in one panel get the names of their files added.
    """
    panels: dict[str, list[tuple[Path, Series]]] = {}
    for file in files:
        for each in results.read(file)[1]:
            if len(each.points) > 1:
                reduction = "" if each.op == "none" else f" {each.op}"
                title = f"{each.operation}{reduction} of {each.dtype}, {each.ranks} ranks"
                panels.setdefault(title, []).append((file, each))
    if not panels:
        raise UsageError(f"nothing to draw in {', '.join(map(str, files))}: no series of two sizes or more")
    found = {}
    for title, entries in panels.items():
        names = [each.name for _, each in entries]
        found[title] = [
            _renamed(each, f"{each.name} ({file.stem})") if names.count(each.name) > 1 else each
            for file, each in entries
        ]
    return found


def _renamed(series: Series, name: str) -> Series:
    return Series(**{**vars(series), "name": name})


def crossovers(drawn: list[Series]) -> list[Crossover]:
    """Return where the fastest of several series changes, between sizes that all have.

    One copy of the bytes does not take part: it does no operation. A crossing is where straight lines through the
    measured points, both axes logarithmic, meet.
    """
    racing = [each for each in drawn if not each.name.startswith("memcpy")]
    if len(racing) < 2:
        return []
    times = {each.name: {point.size_bytes: point.median_s for point in each.points} for each in racing}
    common = sorted(set.intersection(*(set(points) for points in times.values())))
    found: list[Crossover] = []
    ahead = min(times, key=lambda name: times[name][common[0]]) if common else ""
    for before, size in itertools.pairwise(common):
        fastest = min(times, key=lambda name: times[name][size])
        if times[ahead][size] > _LEAD * times[fastest][size]:
            found.append(_crossing(times, ahead, fastest, (before, size)))
            ahead = fastest
    return found


def _crossing(times: dict[str, dict[int, float]], before: str, after: str, between: tuple[int, int]) -> Crossover:
    """Return where two lines meet between two sizes; the first size if they do not."""
    first, last = between
    gap = [math.log(times[after][size] / times[before][size]) for size in between]
    share = gap[0] / (gap[0] - gap[1]) if gap[0] > 0 > gap[1] else 0.0
    seconds = times[before][first] * (times[before][last] / times[before][first]) ** share
    return Crossover(first * (last / first) ** share, seconds, before, after)

"""``plot``: pictures of benchmarks' results and training runs, by matplotlib, without MPI.

Files and folders become panels, two a row; `draw` makes the picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.config import UsageError

from . import results
from .results import Series, format_size

_LEAD = 1.05
"""Smaller gains may be chance."""
_SAME_WORK = ("model", "data", "batch_size")
"""Shared by runs that show scaling."""
# Okabe and Ito's colours, which colour-blind people tell apart; black and dashed is one copy of the bytes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
_MARKERS = "osD^vPX*"
_WIDTH, _HEIGHT = 12.0, 4.4
"""Inches of a row."""

Points = dict[Any, float]
Scaling = dict[str, dict[int, float]]
"""Samples a second by ranks, for each line."""


class Crossover(NamedTuple):
    """From ``size`` another series is the fastest."""

    size_bytes: float
    before: str
    after: str


class Panel(NamedTuple):
    """Lines over numbers, or bars over names."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, Points]
    """By name, values by x."""
    logarithmic: bool = False
    dotted: dict[str, Points] = {}  # noqa: RUF012 (never changed)
    """Of the same name, such as an ideal."""
    marks: Sequence[Crossover] = ()


class Run(NamedTuple):
    name: str
    ranks: int
    config: dict[str, Any]
    epochs: list[dict[str, float | None]]
    """Lines of ``metrics.jsonl``; None if not finite, or not measured."""

    def curve(self, key: str) -> Points:
        """Leave out epochs that have none."""
        return {each["epoch"]: value for each in self.epochs if (value := each.get(key)) is not None}

    @property
    def samples_per_s(self) -> float:
        """The median over epochs: the first warms up, others may have been disturbed."""
        return statistics.median(self.curve("samples_per_s").values())


def run(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix not in (".png", ".svg"):
        raise UsageError(f"--output has to end with .png or .svg, got {arguments.output}")
    if any(path.is_dir() for path in arguments.files):
        runs = read_runs(arguments.files)
        print(table(runs))
        found = run_panels(runs)
    else:
        found = file_panels(arguments.files)
    draw(found, arguments.output)
    for panel in found[::2]:  # latency and bandwidth have the same
        for each in panel.marks:
            title = panel.title.removeprefix("Latency: ")
            print(f"{title}: {each.after} overtakes {each.before} at {format_size(int(each.size_bytes))}")
    print(f"wrote {arguments.output}")
    return 0


def file_panels(files: list[Path]) -> list[Panel]:
    """Files of one kind share panels; UsageError: unreadable or empty files, or kinds without a common panel."""
    documents = [(file, *results.read(file)) for file in files]
    kinds = {document["kind"] for _, document, _ in documents}
    if not kinds & set(_ROWS) and "train" not in kinds:
        return [panel for title, drawn in group_series(files).items() for panel in _of_series(title, drawn)]
    if len(kinds) > 1:
        names = " and ".join(f"`bench {kind}`" for kind in sorted(kinds))
        raise UsageError(f"files of {names} make no common picture: draw them apart")
    for file, document, _ in documents:
        if not document["rows"]:
            raise UsageError(f"nothing to draw in {file}: it has no rows")
    if "train" in kinds:
        return _of_scaling(scaling_of_rows([row for _, document, _ in documents for row in document["rows"]]))
    found: dict[str, Panel] = {}
    for file, document, _ in documents:
        for panel in _ROWS[document["kind"]](document["rows"]):
            mark = f" ({file.stem})" if len(files) > 1 else ""
            whole = found.setdefault(panel.title, panel._replace(lines={}))
            whole.lines.update({f"{name}{mark}": points for name, points in panel.lines.items()})
    return list(found.values())


def _of_overlap(rows: list[dict[str, Any]]) -> list[Panel]:
    ways = ("compute", "comm", "blocking", "unpolled", "overlapped", "wait")
    shares = {"overlap": {row["buckets"]: row["overlap"] for row in rows}}
    times = {way: {row["buckets"]: row[way] * 1e3 for row in rows} for way in ways}
    return [
        Panel("Overlap: hidden share of communication", "buckets", "1 - exposed / comm", shares),
        Panel("Overlap: times", "buckets", "time (ms)", times),
    ]


def _of_ddp(rows: list[dict[str, Any]]) -> list[Panel]:
    ways = [str(way) for way in ("alone", "ddp", "torch", "exposed") if way in rows[0]]
    times = {way: {row["network"]: row[way] * 1e3 for row in rows} for way in ways}
    ratios = {
        f"{way} / alone": {row["network"]: row[way] / row["alone"] for row in rows}
        for way in ways
        if way in ("ddp", "torch")
    }
    return [
        Panel("DDP: a training step", "network", "time (ms)", times, logarithmic=True),
        Panel("DDP: the cost of averaging", "network", "time / time alone", ratios),
    ]


def _of_model(rows: list[dict[str, Any]]) -> list[Panel]:
    times = {name: {row["ranks"]: row["seconds"][name] * 1e3 for row in rows} for name in rows[0]["seconds"]}
    buckets = {"bucket": {row["ranks"]: row["bucket_bytes"] / 2**20 for row in rows}}
    return [
        Panel("Model: all-reduce, predicted", "ranks", "time (ms)", times, logarithmic=True),
        Panel("Model: bucket with least exposed time", "ranks", "bucket (MiB)", buckets, logarithmic=True),
    ]


_ROWS = {"overlap": _of_overlap, "ddp": _of_ddp, "model": _of_model}


def scaling_of_rows(rows: list[dict[str, Any]]) -> Scaling:
    found: Scaling = {}
    for row in rows:
        found.setdefault(f"{row['network']}, {row['scaling']}", {})[row["ranks"]] = row["samples_per_s"]
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def _of_scaling(measured: Scaling) -> list[Panel]:
    """Draw samples a second, with ideal lines from the fewest ranks, and the share of the ideal."""
    ideal = {name: {n: points[min(points)] * n / min(points) for n in points} for name, points in measured.items()}
    shares = {
        name: {n: 100 * found / ideal[name][n] for n, found in points.items()} for name, points in measured.items()
    }
    title = "Training: samples a second (dotted: ideal)"
    return [
        Panel(title, "ranks", "samples a second", dict(measured), logarithmic=True, dotted=dict(ideal)),
        Panel("Efficiency (%)", "ranks", "% of the ideal", shares),
    ]


def group_series(files: list[Path]) -> dict[str, list[Series]]:
    """Group by operation, reduction, dtype and ranks; equal names get the files' names added."""
    groups: dict[str, list[tuple[Path, Series]]] = {}
    for file in files:
        for each in results.read(file)[1]:
            if len(each.points) > 1:
                reduction = "" if each.op == "none" else f" {each.op}"
                title = f"{each.operation}{reduction} of {each.dtype}, {each.ranks} ranks"
                groups.setdefault(title, []).append((file, each))
    if not groups:
        raise UsageError(f"nothing to draw in {', '.join(map(str, files))}: no series of two sizes or more")
    found = {}
    for title, entries in groups.items():
        names = [each.name for _, each in entries]
        found[title] = [
            dataclasses.replace(each, name=f"{each.name} ({file.stem})") if names.count(each.name) > 1 else each
            for file, each in entries
        ]
    return found


def _of_series(title: str, drawn: list[Series]) -> list[Panel]:
    marks = crossovers(drawn)
    times = {each.name: {point.size_bytes: point.median_s * 1e6 for point in each.points} for each in drawn}
    rates = {each.name: {p.size_bytes: each.bus_bandwidth(p) / 1e9 for p in each.points} for each in drawn}
    return [
        Panel(f"Latency: {title}", "size (bytes)", "time (µs)", times, logarithmic=True, marks=marks),
        Panel(f"Bus bandwidth: {title}", "size (bytes)", "bus bandwidth (GB/s)", rates, marks=marks),
    ]


def crossovers(drawn: list[Series]) -> list[Crossover]:
    """Find the sizes at which the fastest changes; one copy of the bytes does not compete.

    A crossing is that of straight lines through the measured points on logarithmic axes.
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
    """Return the first size if the lines do not cross."""
    first, last = between
    gap = [math.log(times[after][size] / times[before][size]) for size in between]
    share = gap[0] / (gap[0] - gap[1]) if gap[0] > 0 > gap[1] else 0.0
    return Crossover(first * (last / first) ** share, before, after)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """UsageError if a folder is none of ``train --output``, or has no epoch."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1  # of names: the ends of paths, long enough to tell them apart
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    return [_read_run(folder, "/".join(each[-length:])) for folder, each in zip(folders, parts, strict=True)]


def _read_run(folder: Path, name: str) -> Run:
    try:
        config = json.loads((folder / "config.json").read_text())
        ranks = len(json.loads((folder / "run.json").read_text())["ranks"])
        lines = (folder / "metrics.jsonl").read_text()
        # A killed run leaves a line without its end.
        epochs = [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]
    except OSError as error:
        raise UsageError(f"{folder} is no folder of `train --output`: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}: a file of the run is damaged ({error!r})") from error
    if not epochs:
        raise UsageError(f"nothing to draw in {folder}: no epoch has ended yet")
    return Run(name, ranks, config, epochs)


def scaling_of_runs(runs: Sequence[Run]) -> Scaling:
    """Return the median of equal runs, for work done on several numbers of ranks."""
    found: dict[str, dict[int, list[float]]] = {}
    for each in runs:
        work = ", ".join(f"{key} {each.config[key]}" for key in _SAME_WORK if each.config.get(key) is not None)
        found.setdefault(work, {}).setdefault(each.ranks, []).append(each.samples_per_s)
    return {
        work: {ranks: statistics.median(by_ranks[ranks]) for ranks in sorted(by_ranks)}
        for work, by_ranks in found.items()
        if len(by_ranks) > 1
    }


def run_panels(runs: Sequence[Run]) -> list[Panel]:
    """Draw metrics over epochs, and scaling where runs differ in ranks alone."""
    names = [f"{each.name} ({each.ranks} rank{'s' * (each.ranks > 1)})" for each in runs]

    def curves(key: str, factor: float = 1) -> dict[str, Points]:
        return {
            name: {epoch: factor * value for epoch, value in each.curve(key).items()}
            for name, each in zip(names, runs, strict=True)
        }

    measured = scaling_of_runs(runs)
    return [
        Panel("Loss (dotted: of test data)", "epoch", "loss", curves("loss"), dotted=curves("test_loss")),
        Panel("Accuracy on test data (%)", "epoch", "%", curves("accuracy", 100)),
        Panel("Training samples a second, all ranks", "epoch", "samples a second", curves("samples_per_s")),
        Panel("Exposed communication (% of the time)", "epoch", "%", curves("comm_exposed", 100)),
        *(_of_scaling(measured) if measured else ()),
    ]


def table(runs: Sequence[Run]) -> str:
    width = max(len("run"), *(len(each.name) for each in runs))
    lines = [f"{'run':{width}}  ranks  epochs  last loss  best accuracy (epoch)  samples/s"]
    for each in runs:
        losses, accuracies = list(each.curve("loss").values()), each.curve("accuracy")
        loss = f"{losses[-1]:.4f}" if losses else "-"
        best = max(accuracies, key=lambda epoch: (accuracies[epoch], -epoch), default=None)
        accuracy = "-" if best is None else f"{accuracies[best]:.4f} ({best:.0f})"
        lines.append(
            f"{each.name:{width}}{each.ranks:7}{len(each.epochs):8}{loss:>11}{accuracy:>23}{each.samples_per_s:11,.0f}"
        )
    return "\n".join(lines)


def draw(panels: list[Panel], path: Path) -> None:
    """Draw an even number of panels, two a row; UsageError without matplotlib, or for an unwritable file."""
    try:
        from matplotlib import ticker
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"plot needs matplotlib ({error}): pip install 'mpiddp[plot]'") from None
    rows = len(panels) // 2
    figure = Figure(figsize=(_WIDTH, _HEIGHT * rows), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, 2, squeeze=False).flat, panels, strict=True):
        if panel.x_label == "network":
            _bars(axes, panel)
        else:
            _curves(axes, panel, ticker)
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        if panel.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        elif min((y for points in panel.lines.values() for y in points.values()), default=0) >= 0:
            axes.set_ylim(bottom=0)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _curves(axes: Any, panel: Panel, ticker: Any) -> None:
    styles = itertools.cycle(zip(_COLOURS, _MARKERS, strict=True))
    for name, points in panel.lines.items():
        is_copy = name.startswith("memcpy")
        colour, marker = ("black", "") if is_copy else next(styles)
        style = "--" if is_copy else "-"
        axes.plot(list(points), list(points.values()), style, color=colour, marker=marker, markersize=4, label=name)
        beside = panel.dotted.get(name, {})
        axes.plot(list(beside), list(beside.values()), ":", color=colour, linewidth=0.9)
    for each in panel.marks:
        axes.axvline(each.size_bytes, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            f"{each.after} from {format_size(int(each.size_bytes))}",
            (each.size_bytes, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize="x-small",
            color="0.3",
        )
    if panel.x_label == "epoch":
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        return
    text = format_size if panel.x_label.startswith("size") else "{:g}".format
    axes.set_xscale("log", base=2)
    if panel.x_label.startswith("size"):
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, subs=(1.0,), numticks=12))
    else:
        axes.set_xticks(sorted({x for points in panel.lines.values() for x in points}))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.lines)
    names = list(dict.fromkeys(name for points in panel.lines.values() for name in points))
    for index, ((label, points), colour) in enumerate(zip(panel.lines.items(), itertools.cycle(_COLOURS))):
        places = [names.index(name) + (index + 0.5) * width - 0.4 for name in points]
        axes.bar(places, list(points.values()), width, color=colour, label=label)
    axes.set_xticks(range(len(names)), [str(name) for name in names])

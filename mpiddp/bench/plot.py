"""``plot``: draw the results of benchmarks with matplotlib. It needs no MPI."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.options import UsageError, refusing

from . import results
from .results import format_size


class Panel(NamedTuple):
    title: str
    x_label: str
    y_label: str
    lines: dict[str, dict[Any, float]]
    """The name of each line, with its points: y for each x."""


_STEPS = ("alone", "ddp", "exposed", "torch", "torch-alone", "on-mpiddp", "in-ours")
# For each kind of result that has rows: the title, the key of x in a row, the label of y, the factor of y, and the
# columns to draw.
_ROWS: dict[str, tuple[str, str, str, float, tuple[str, ...]]] = {
    "ddp": ("DDP: a training step", "network", "time (ms)", 1e3, _STEPS),
    "train": ("Training: samples a second", "ranks", "samples a second", 1, ("samples_per_s",)),
}


def run(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix not in (".png", ".svg"):
        raise UsageError(f"--output has to end with .png or .svg, got {arguments.output}")
    found = panels(arguments.files)
    if not found:
        raise UsageError(f"nothing to draw in {', '.join(map(str, arguments.files))}")
    draw(found, arguments.output)
    print(f"wrote {arguments.output}")
    return 0


def panels(paths: list[Path]) -> list[Panel]:
    """Return the panels that show the results in the files. With several files, names of lines end with the file's."""
    found: dict[str, Panel] = {}
    for path in paths:
        mark = f" ({path.stem})" if len(paths) > 1 else ""
        for title, x_label, y_label, lines in _of_file(path):
            panel = found.setdefault(title, Panel(title, x_label, y_label, {}))
            for name, points in lines.items():
                # Files of `bench train` add their points to the same line, because each may cover other numbers of
                # ranks.
                panel.lines.setdefault(name if x_label == "ranks" else name + mark, {}).update(points)
    return list(found.values())


def _of_file(file: Path) -> Iterator[Panel]:
    document, series = results.read(file)
    if document["kind"] in _ROWS:
        title, x, y, factor, columns = _ROWS[document["kind"]]
        for row in document["rows"]:
            for column in columns:
                if column in row:
                    name = f"{row['network']}, {row['scaling']}" if "scaling" in row else column
                    yield Panel(title, x, y, {name: {row[x]: factor * row[column]}})
    for each in series:
        if len(each.points) > 1:
            title = f"{each.operation} {each.op} of {each.dtype}, {each.ranks} ranks".replace(" none", "")
            times = {point.size_bytes: point.median_s * 1e6 for point in each.points}
            rates = {point.size_bytes: each.bus_bandwidth(point) / 1e9 for point in each.points}
            yield Panel(f"Latency: {title}", "size (bytes)", "time (us)", {each.name: times})
            yield Panel(f"Bus bandwidth: {title}", "size (bytes)", "GB/s", {each.name: rates})


def draw(found: list[Panel], path: Path) -> None:
    """Draw the panels, two in a row, into a file. UsageError without matplotlib, or if the file cannot be written."""
    with refusing("plot needs matplotlib (", ImportError, after="): pip install 'mpiddp[plot]'"):
        from matplotlib.figure import Figure
    rows = -(-len(found) // 2)
    figure = Figure(figsize=(12, 4.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for each, panel in zip(axes, found, strict=False):
        for name, points in panel.lines.items():
            x = sorted(points)
            style = "none" if panel.x_label == "network" else "-"
            each.plot(x, [points[value] for value in x], linestyle=style, marker="o", markersize=4, label=name)
        if panel.x_label.startswith("size"):
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter(lambda value, _: format_size(int(value)))
        if panel.y_label.startswith("time"):
            each.set_yscale("log")
        each.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        each.grid(color="0.9")
        each.legend(frameon=False, fontsize="small")
    for each in axes[len(found) :]:
        each.set_axis_off()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None

"""``plot``: draw the results of benchmarks with matplotlib. It needs no MPI."""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.options import UsageError, refusing

from .results import FORMAT, format_size


class Panel(NamedTuple):
    title: str
    x: str
    y: str


Lines = Mapping[str, dict[Any, float]]
"""The name of each line, with its points: y for each x."""

_OPERATION = "{operation} {op} of {dtype}, {ranks} ranks"
_OPERATIONS = [
    (Panel(f"Latency: {_OPERATION}", "size_bytes", "time (us)"), 1e6, "median_s", "{name}"),
    (Panel(f"Bus bandwidth: {_OPERATION}", "size_bytes", "GB/s"), 1e-9, "bus_bandwidth", "{name}"),
]
_STEPS = "alone ddp exposed torch torch-alone on-mpiddp in-ours"
_RATES = Panel("Training: samples a second", "ranks", "samples a second")
# The panels for each kind of result. Each has the factor of y, the columns of a row to draw, and the name of a line.
_PANELS: dict[str, list[tuple[Panel, float, str, str]]] = {
    "sweep": _OPERATIONS,
    "compare": _OPERATIONS,
    "ddp": [(Panel("DDP: a training step", "network", "time (ms)"), 1e3, _STEPS, "{column}")],
    "train": [(_RATES, 1, "samples_per_s", "{network}, {scaling}")],
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


def panels(paths: list[Path]) -> Mapping[Panel, Lines]:
    """Return the panels that show the results in the files.

    With several files, names of lines end with the file's, except for files of `bench train`. UsageError if a file
    cannot be read, or if no benchmark of this version has written it.
    """
    found: defaultdict[Panel, defaultdict[str, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in paths:
        no_result = refusing(f"{path} is no file of a benchmark's --json FILE: ", ValueError, KeyError, TypeError)
        with refusing("cannot read ", OSError), no_result:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise ValueError(f"it has the format {document['format']!r}, this version reads {FORMAT!r}")
            # Files of `bench train` add their points to the same line, because each may cover other numbers of ranks.
            mark = f" ({path.stem})" if len(paths) > 1 and document["kind"] != "train" else ""
            for row, (panel, factor, columns, name) in product(document["rows"], _PANELS[document["kind"]]):
                shown = panel._replace(title=panel.title.format(**row).replace(" none", ""))
                for column in columns.split():
                    if row[panel.x] and column in row:  # a barrier has no size
                        found[shown][name.format(column=column, **row) + mark][row[panel.x]] = factor * row[column]
    return found


def draw(found: Mapping[Panel, Lines], path: Path) -> None:
    """Draw the panels, two in a row, into a file. UsageError without matplotlib, or if the file cannot be written."""
    with refusing("plot needs matplotlib (", ImportError, after="): pip install 'mpiddp[plot]'"):
        from matplotlib.figure import Figure
    rows = -(-len(found) // 2)
    figure = Figure(figsize=(12, 4.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for each, (panel, lines) in zip(axes, found.items(), strict=False):
        for name, points in lines.items():
            x = sorted(points)
            style = "none" if panel.x == "network" else "-"
            each.plot(x, [points[value] for value in x], linestyle=style, marker="o", markersize=4, label=name)
        if panel.x == "size_bytes":
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter(lambda value, _: format_size(int(value)))
        if panel.y.startswith("time"):
            each.set_yscale("log")
        each.set(title=panel.title, xlabel=panel.x.replace("_bytes", " (bytes)"), ylabel=panel.y)
        each.grid(color="0.9")
        each.legend(frameon=False, fontsize="small")
    for each in axes[len(found) :]:
        each.set_axis_off()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None

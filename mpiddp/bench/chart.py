"""The drawing of `plot`: what benchmarks have measured. Imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from . import sizes
from .panels import Panel
from .plot import crossovers
from .results import Series

# Okabe and Ito's colours, which colour-blind people tell apart too; black and dashed is what does no operation.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
_MARKERS = "osD^vPX*"
WIDTH, HEIGHT = 12.0, 4.4
"""Of a row, in inches."""


def draw(panels: dict[str, list[Series]], path: Path) -> None:
    """Draw a row for each group of series, latency on the left and bus bandwidth on the right.

    Parameters
    ----------
    panels : dict
        Series by the title of their row.
    path : Path
        A file whose ending says what it is.
    """
    figure = Figure(figsize=(WIDTH, HEIGHT * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 2, squeeze=False)
    for (latency, bandwidth), (title, drawn) in zip(rows, panels.items(), strict=True):
        _lines(latency, bandwidth, drawn)
        _label(latency, f"Latency: {title}", "time (µs)")
        _label(bandwidth, f"Bus bandwidth: {title}", "bus bandwidth (GB/s)")
        latency.set_yscale("log")
        latency.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        bandwidth.set_ylim(bottom=0)
        _mark(latency, bandwidth, drawn)
        latency.legend(loc="upper left", frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_scaling(measured: dict[str, dict[int, float]], path: Path) -> None:
    """Draw how training scales; see `draw_scaling_axes`.

    Parameters
    ----------
    measured : dict
        Samples a second by ranks, for each line.
    path : Path
        A file whose ending says what it is.
    """
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    throughput, efficiency = figure.subplots(1, 2)
    draw_scaling_axes(throughput, efficiency, measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_scaling_axes(throughput: Axes, efficiency: Axes, measured: dict[str, dict[int, float]]) -> None:
    """Draw samples a second against ranks, with ideal lines, and the share of the ideal.

    Parameters
    ----------
    throughput, efficiency : Axes
        Where to draw them.
    measured : dict
        Samples a second by ranks, for each line; the ideal begins at the fewest ranks.
    """
    for (name, points), colour, marker in zip(measured.items(), COLOURS * 9, _MARKERS * 9, strict=False):
        ranks = list(points)
        ideal = [points[ranks[0]] * each / ranks[0] for each in ranks]
        throughput.plot(ranks, list(points.values()), color=colour, marker=marker)
        throughput.plot(ranks, ideal, color=colour, linestyle=":", linewidth=0.9)
        shares = [100 * found / best for found, best in zip(points.values(), ideal, strict=True)]
        efficiency.plot(ranks, shares, color=colour, marker=marker, label=name)
    for axes, title in ((throughput, "Training: samples a second (dotted: ideal)"), (efficiency, "Efficiency (%)")):
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_xlabel("ranks")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({each for points in measured.values() for each in points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    throughput.set_yscale("log")
    throughput.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    efficiency.legend(loc="lower left", frameon=False, fontsize="small")
    efficiency.set_ylim(bottom=0)


def draw_panels(panels: list[Panel], path: Path) -> None:
    """Draw diagrams of lines or bars, two in a row.

    Parameters
    ----------
    panels : list of Panel
        An even number of them.
    path : Path
        A file whose ending says what it is.
    """
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, 2, squeeze=False).flat, panels, strict=True):
        _bars(axes, panel) if panel.x_label == "network" else _curves(axes, panel)
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        if panel.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _curves(axes: Axes, panel: Panel) -> None:
    """Draw lines over powers of two."""
    for (name, points), colour, marker in zip(panel.lines.items(), COLOURS * 9, _MARKERS * 9, strict=False):
        axes.plot(list(points), list(points.values()), color=colour, marker=marker, markersize=4.0, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _bars(axes: Axes, panel: Panel) -> None:
    """Draw a group of bars for each name."""
    width = 0.8 / len(panel.lines)
    names = list(dict.fromkeys(name for points in panel.lines.values() for name in points))
    for index, ((label, points), colour) in enumerate(zip(panel.lines.items(), COLOURS * 9, strict=False)):
        places = [names.index(name) + (index + 0.5) * width - 0.4 for name in points]
        axes.bar(places, list(points.values()), width, color=colour, label=label)
    axes.set_xticks(range(len(names)), [str(name) for name in names])


def _lines(latency: Axes, bandwidth: Axes, drawn: list[Series]) -> None:
    """Draw the series."""
    styles = iter(zip(COLOURS * len(drawn), _MARKERS * len(drawn), strict=False))
    for each in drawn:
        x = [point.size_bytes for point in each.points]
        is_copy = each.name.startswith("memcpy")
        colour, marker = ("black", "") if is_copy else next(styles)
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.0, "linewidth": 1.4}
        look["linestyle"] = "--" if is_copy else "-"
        latency.plot(x, [point.median_s * 1e6 for point in each.points], label=each.name, **look)
        bandwidth.plot(x, [each.bus_bandwidth(point) / 1e9 for point in each.points], **look)


def _mark(latency: Axes, bandwidth: Axes, drawn: list[Series]) -> None:
    """Mark where another series becomes the fastest."""
    for each in crossovers(drawn):
        for axes in (latency, bandwidth):
            axes.axvline(each.size_bytes, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        latency.plot([each.size_bytes], [each.seconds * 1e6], "o", markersize=9, fillstyle="none", color="0.3")
        bandwidth.annotate(
            f"{each.after} from {sizes.text(int(each.size_bytes))}",
            (each.size_bytes, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize="x-small",
            color="0.3",
        )


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: sizes.text(int(value))))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)

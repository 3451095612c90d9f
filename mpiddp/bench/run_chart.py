"""The drawing of training runs, for `plot`. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .chart import COLOURS, HEIGHT, WIDTH, draw_scaling_axes
from .runs import Run, scaling


def draw_runs(runs: Sequence[Run], path: Path) -> None:
    """Draw loss, accuracy, throughput and exposed communication against epochs, all runs in each.

    Where runs of the same work had different numbers of ranks, a third row shows how it scales.

    Parameters
    ----------
    runs : sequence of Run
        What to compare.
    path : Path
        A file whose ending says what it is.
    """
    measured = scaling(runs)
    rows = 3 if measured else 2
    figure = Figure(figsize=(WIDTH, HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, 2)
    loss, accuracy, throughput, exposed = axes[:2].flat
    for run, colour in zip(runs, cycle(COLOURS)):
        loss.plot(
            *run.curve("loss"), color=colour, marker=".", label=f"{run.name} ({run.ranks} rank{'s' * (run.ranks > 1)})"
        )
        loss.plot(*run.curve("test_loss"), color=colour, linestyle=":")
        throughput.plot(*run.curve("samples_per_s"), color=colour)
        for panel, key in ((accuracy, "accuracy"), (exposed, "comm_exposed")):
            epochs, shares = run.curve(key)
            panel.plot(epochs, [100 * share for share in shares], color=colour)
    _label(loss, "Loss (dotted: of test data)")
    _label(accuracy, "Accuracy on test data (%)")
    _label(throughput, "Training samples a second, all ranks")
    _label(exposed, "Time that ranks wait for communication (%)")
    for panel in (throughput, exposed):
        panel.set_ylim(bottom=0)
    loss.legend(frameon=False, fontsize="small")
    if measured:
        draw_scaling_axes(axes[2, 0], axes[2, 1], measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)

"""``python .github/pictures/draw.py``: measure on two ranks, and draw the two pictures of the README beside this file.

It needs an idle machine, mpirun, and ``pip install '.[plot,torch]'``; it takes about a minute. ``--step FILE`` is for
the ranks that it starts: they train a few steps under a timeline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import mpiddp as dist
from mpiddp import nn, optim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
SIZES = ("-b", "8", "-e", "64M", "-f", "4")
COLOURS = {"gloo": "#d95f02", "mpi4py": "#7570b3", "mpiddp": "#66a61e", "mpiddp symmetric": "#1b7837", "memcpy": "0.6"}
NAMES = {
    "gloo": "torch on Gloo",
    "mpi4py": "MPI (mpi4py)",
    "mpiddp": "mpiddp",
    "mpiddp symmetric": "mpiddp, symmetric memory",
    "memcpy": "one memcpy",
}
COLOURS_OF_LANES = {
    "forward": "#a6cee3",
    "backward": "#1f78b4",
    "bucket": "#66a61e",
    "wait": "#e31a1c",
    "optimizer": "#ff7f00",
}


def train_steps(trace: str) -> None:
    """Train ten steps on all ranks; the last one is drawn, when buckets and caches are warm."""
    dist.init_process_group()
    dist.manual_seed(1)
    layers = [module for _ in range(4) for module in (nn.Linear(1024, 1024), nn.ReLU())]
    ddp = dist.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)), bucket_cap_mb=4)
    optimizer = optim.SGD(ddp.parameters(), lr=0.01)
    ddp.timeline = timeline = dist.Timeline(trace)
    timeline.watch(optimizer)
    x = np.random.default_rng(dist.get_rank()).normal(size=(128, 1024)).astype(np.float32)
    for _ in range(10):
        dist.barrier()
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), np.arange(128) % 10).backward()
        optimizer.step()
    timeline.write()


def draw_all_reduce(result: Path) -> None:
    """Draw the times of ``bench compare`` over sizes."""
    document = json.loads(result.read_text())
    figure, axes = new_figure(4.2)
    for name, colour in COLOURS.items():
        points = [(row["size_bytes"], row["median_s"] * 1e6) for row in document["rows"] if row["name"] == name]
        style = "--" if name == "memcpy" else "-"
        axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=NAMES[name])
    ticks = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, ["8 B", "64 B", "512 B", "4 KiB", "32 KiB", "256 KiB", "2 MiB", "16 MiB"])
    library = document["environment"]["mpi"]["library"]
    axes.set(yscale="log", ylabel="microseconds", title=f"all_reduce of float32, 2 ranks, {library}")
    axes.grid(color="0.92")
    axes.legend(frameon=False)
    save(figure, "all_reduce.svg")


def draw_step(trace: Path) -> None:
    """Draw the last step of each rank: what it computes in one row, its buckets in rows below."""
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [
        (each["pid"], lanes[each["pid"], each["tid"]], each["ts"], each["dur"]) for each in events if "dur" in each
    ]
    begins = [max(start for rank, lane, start, _ in spans if (rank, lane) == (one, "forward")) for one in (0, 1)]
    rows: dict[tuple[int, str], int] = {}
    figure, axes = new_figure(3.6)
    for rank, lane, start, took in sorted(spans):
        if start >= begins[rank]:
            row = rows.setdefault((rank, lane if lane.startswith("bucket") else ""), len(rows))
            colour = COLOURS_OF_LANES[lane.split()[0]]
            axes.barh(row, took / 1e3, left=(start - min(begins)) / 1e3, color=colour)
    axes.set_yticks(range(len(rows)), [lane or f"rank {rank}" for rank, lane in rows])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title="A step of DistributedDataParallel on 2 ranks")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.legend([Patch(color=colour) for colour in COLOURS_OF_LANES.values()], COLOURS_OF_LANES, frameon=False)
    save(figure, "step.svg")


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure that is as wide as a page, and its axes."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mpiddp", "font.family": "sans-serif"}
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()


def save(figure: Figure, name: str) -> None:
    """Write an SVG whose bytes depend on the measurement only."""
    figure.savefig(HERE / name, metadata={"Date": None})
    print(f"wrote {HERE / name}")


def main() -> None:
    """Measure, then draw."""
    if sys.argv[1:2] == ["--step"]:
        train_steps(sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        result, trace = Path(folder, "all_reduce.json"), Path(folder, "trace.json")
        job = ["mpirun", "-np", "2", sys.executable]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        bench = ["-m", "mpiddp", "bench", "compare", "all_reduce", *SIZES, "--json", str(result)]
        subprocess.run([*job, *bench], env=environment, check=True)
        subprocess.run([*job, __file__, "--step", str(trace)], env=environment, check=True)
        draw_all_reduce(result)
        draw_step(trace)


if __name__ == "__main__":
    main()

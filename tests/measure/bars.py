"""Two builds side by side: ``python -m tests.measure.bars OLD NEW [--ranks 2 4] [--rounds N]``.

A build is a checkout, or an unpacked wheel. In every round each build has a job of its own, and they take turns: a
ratio compares what the machine gave to both within seconds. A figure is the fastest of many loops (see `bars_job`); the
tables have its median and minimum over the rounds, and the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness import launcher
from harness.hosts import mpi_library

JOB = Path(__file__).with_name("bars_job.py")
IMPORT = """
import json, time
start = time.perf_counter()
import mpiddp
print(json.dumps({"seconds": time.perf_counter() - start, "mpiddp": mpiddp.__file__}))
"""
BUDGET_S = 0.1
"""For a bar in a round."""
IMPORTS = 3
"""Imports of mpiddp a round; the fastest counts."""
BUILDS = ("old", "new")
Figures = dict[str, dict[str, list[float]]]
"""Seconds by bar and build, one for each round."""


def run(program: str | Path, checkout: Path, *words: object, ranks: int | None = None) -> Any:
    """Return what a job of a checkout prints, in JSON, and refuse figures of another mpiddp, an installed one, say."""
    done = launcher.job(program, *words, ranks=ranks, limit_s=300, PYTHONPATH=str(checkout))
    if done.rc != 0:
        raise SystemExit(f"{checkout}: {done}")
    told = json.loads(done.stdout.splitlines()[-1])
    if not Path(told["mpiddp"]).resolve().is_relative_to(checkout):
        raise SystemExit(f"expected the mpiddp of {checkout}, but the job imported {told['mpiddp']}")
    return told


def measure(checkout: Path, ranks: int) -> dict[str, float]:
    """Return a build's figures of one round; of several imports the fastest counts."""
    if ranks:
        return dict(run(JOB, checkout, BUDGET_S, ranks=ranks)["seconds"])
    return {"import mpiddp": min(run(IMPORT, checkout)["seconds"] for _ in range(IMPORTS))}


def ratios(found: Figures) -> str:
    """Return a table in microseconds, and new by old: the median of the rounds' ratios, and of the minima."""
    lines = ["| bar | old median | old min | new median | new min | new/old | of minima |", "|---|" + "---:|" * 6]
    for bar, builds in found.items():
        old, new = ((statistics.median(builds[build]), min(builds[build])) for build in BUILDS)
        times = " | ".join(f"{seconds * 1e6:,.1f}" for seconds in (*old, *new))
        ratio = statistics.median(b / a for a, b in zip(builds["old"], builds["new"], strict=True))
        lines.append(f"| {bar} | {times} | {ratio:.2f} | {new[1] / old[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.measure.bars", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of mpiddp")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="even numbers of ranks")
    parser.add_argument("--rounds", type=int, default=6, help="how often each build measures each bar (6)")
    options = parser.parse_args()
    if any(size < 2 or size % 2 for size in options.ranks):
        parser.error("the ping-pong is between pairs of ranks: expected even numbers of ranks")
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    begin = time.monotonic()
    figures: dict[int, Figures] = {size: {} for size in [*options.ranks, 0]}
    for number in range(options.rounds):
        for size, found in figures.items():
            for build in BUILDS[:: -1 if number % 2 else 1]:
                for bar, seconds in measure(checkouts[build], size).items():
                    found.setdefault(bar, {build: [] for build in BUILDS})[build].append(seconds)
        print(f"{number + 1} of {options.rounds} rounds, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    print(f"{mpi_library()}, {options.rounds} rounds, microseconds")
    for size, found in figures.items():
        print(f"\n{size} ranks\n" if size else "\nwithout a launcher\n")
        print(ratios(found))


if __name__ == "__main__":
    main()

"""Two checkouts side by side: ``python -m tests.bars OLD NEW [--ranks 2 4] [--rounds N] [--json FILE]``.

The builds take turns, with the MPI of this environment, so that a ratio compares what the machine gave to both at
about the same time. A figure is the fastest of many loops within one job (see `bars_job`); the table has its median and
minimum over the jobs, and a second one how far a call is from mpi4py's own in the same job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.harness import launcher

JOB = Path(__file__).with_name("bars_job.py")
IMPORT = "import time; start = time.perf_counter(); import mpiddp; print(time.perf_counter() - start, mpiddp.__file__)"
IMPORTS = 5
"""How often a round imports mpiddp; the fastest counts."""
BUILDS = ("old", "new")

BESIDE = {
    "all_reduce 8 B": "mpi4py Allreduce 8 B",
    "async all_reduce 8 B + wait": "mpi4py Allreduce 8 B",
    "broadcast 8 B": "mpi4py Bcast 8 B",
    "barrier": "mpi4py Barrier",
    "all_gather_single 8 B": "mpi4py Allgather 8 B",
    "reduce_scatter_single 8 B": "mpi4py Reduce_scatter_block 8 B",
    "8 isend + 8 irecv + wait": "mpi4py 8 Isend + 8 Irecv + Waitall",
    "batch_isend_irecv of 16": "mpi4py 8 Isend + 8 Irecv + Waitall",
    "send/recv ping-pong": "mpi4py Send/Recv ping-pong",
}
"""Bars, and mpi4py's call for the same."""

Figures = dict[str, dict[str, list[float]]]
"""Seconds by bar and build, one for each round."""


def of_checkout(checkout: Path, file: str) -> None:
    """Refuse figures of another mpiddp than the one asked for: an installed one, say."""
    if not Path(file).resolve().is_relative_to(checkout):
        raise SystemExit(f"expected the mpiddp of {checkout}, but the job imported {file}")


def job(checkout: Path, ranks: int, budget_s: float) -> tuple[str, dict[str, float]]:
    """Return the MPI library and the seconds by bar of one job."""
    done = launcher.mpirun(ranks, JOB, str(budget_s), timeout_s=180, env={"PYTHONPATH": str(checkout)})
    if done.rc != 0:
        raise SystemExit(f"{checkout} on {ranks} ranks: {done}")
    found = json.loads(done.stdout)
    of_checkout(checkout, found["mpiddp"])
    return found["library"], found["bars"]


def import_time(checkout: Path) -> float:
    """Return the seconds that importing mpiddp takes, the fastest of some."""
    found = []
    for _ in range(IMPORTS):
        done = launcher.python(IMPORT, env={"PYTHONPATH": str(checkout)})
        if done.rc != 0:
            raise SystemExit(f"import from {checkout}: {done}")
        seconds, _, file = done.stdout.strip().partition(" ")
        of_checkout(checkout, file)
        found.append(float(seconds))
    return min(found)


def measure(
    checkouts: dict[str, Path], ranks: list[int], rounds: int, budget_s: float
) -> tuple[str, dict[int, Figures]]:
    """Return the MPI library, and figures by number of ranks; 0 ranks is without a launcher."""
    library, begin = "", time.monotonic()
    figures = {size: defaultdict(lambda: {build: [] for build in BUILDS}) for size in [*ranks, 0]}
    for number in range(rounds):
        for size in ranks:
            for build in BUILDS[:: -1 if number % 2 else 1]:
                library, bars = job(checkouts[build], size, budget_s)
                for bar, seconds in bars.items():
                    figures[size][bar][build].append(seconds)
        for build in BUILDS[:: -1 if number % 2 else 1]:
            figures[0]["import mpiddp"][build].append(import_time(checkouts[build]))
        print(f"round {number + 1} of {rounds}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return library, {size: dict(found) for size, found in figures.items()}


def ratios(found: Figures) -> str:
    """Return a table in microseconds, and new by old."""
    lines = ["| bar | old median | old min | new median | new min | new/old median | min |", "|---|" + "---:|" * 6]
    for bar, builds in found.items():
        old, new = ((statistics.median(builds[build]), min(builds[build])) for build in BUILDS)
        times = " | ".join(f"{seconds * 1e6:,.1f}" for seconds in (*old, *new))
        lines.append(f"| {bar} | {times} | {new[0] / old[0]:.2f} | {new[1] / old[1]:.2f} |")
    return "\n".join(lines)


def beside(found: Figures) -> str:
    """Return a table of how many microseconds a call takes more than mpi4py's in the same job, the median of rounds."""
    lines = ["| bar | mpi4py, min | old: mpi4py + | new: mpi4py + |", "|---|---:|---:|---:|"]
    for bar, plain in BESIDE.items():
        least = min(min(found[plain][build]) for build in BUILDS)
        more = [
            statistics.median(
                ours - theirs for ours, theirs in zip(found[bar][build], found[plain][build], strict=True)
            )
            for build in BUILDS
        ]
        lines.append(f"| {bar} | {least * 1e6:.1f} | {more[0] * 1e6:+.1f} | {more[1] * 1e6:+.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bars", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of mpiddp")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="even numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each build on each number of ranks")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for a bar in a job (0.2)")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds, in seconds, to this file")
    options = parser.parse_args()
    if any(size < 2 or size % 2 for size in options.ranks):
        parser.error("the ping-pong is between pairs of ranks: expected even numbers of ranks")
    checkouts = dict(zip(BUILDS, (options.old.resolve(), options.new.resolve()), strict=True))
    library, figures = measure(checkouts, options.ranks, options.rounds, options.budget)
    if options.json:
        options.json.write_text(json.dumps({"library": library, "figures": figures}, indent=1) + "\n")
    print(f"{library}, {options.rounds} rounds, microseconds")
    for size, found in figures.items():
        print(f"\n{size} ranks\n" if size else "\nwithout a launcher\n")
        print(ratios(found))
        if size:
            print("\n" + beside(found))


if __name__ == "__main__":
    main()

"""Two builds side by side: ``python -m tests.measure.bars OLD NEW [--ranks 2 4] [--rounds N] [--json FILE]``.

A build is a checkout, or a wheel that was kept (``pip wheel --no-deps .``). Jobs of both measure a bar in turn, each
while the other sleeps: a ratio compares what the machine gave to both within a fraction of a second. Every few rounds
there are new jobs, elsewhere in memory. A figure is the fastest of many loops (see `bars_job`); the tables have its
median and minimum over the rounds, the median of the rounds' ratios, and how far a call is from mpi4py's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from harness import launcher

JOB = Path(__file__).with_name("bars_job.py")
IMPORT = "import time; start = time.perf_counter(); import mpiddp; print(time.perf_counter() - start, mpiddp.__file__)"
IMPORTS = 3
"""Imports of mpiddp a round; the fastest counts."""
BUILDS = ("old", "new")
ROUNDS_OF_JOBS = 3
"""Of one pair of jobs."""
ANSWER_S = 60
"""For a job to begin, or to answer."""

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


class Job:
    """A job of a checkout, which measures when it is asked."""

    def __init__(self, checkout: Path, ranks: int, budget_s: float, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._asked = folder, 0
        self.program = launcher.start(JOB, folder, budget_s, ranks=ranks, PYTHONPATH=str(checkout))
        self._checkout = checkout

    def begin(self) -> tuple[str, list[str]]:
        """Return the MPI library and the names of the bars."""
        found = self._answer(-1)
        of_checkout(self._checkout, found["mpiddp"])
        return found["library"], found["bars"]

    def measure(self, bar: str) -> float:
        number = self._ask(bar)
        return self._answer(number)

    def end(self) -> None:
        self._ask("")
        done = self.program.wait(30)
        if done.rc != 0:
            raise SystemExit(f"{self._checkout}: {done}")

    def _ask(self, bar: str) -> int:
        number, self._asked = self._asked, self._asked + 1
        part = self._folder / "question"
        part.write_text(bar)
        part.rename(self._folder / f"{number}.ask")
        return number

    def _answer(self, number: int) -> Any:
        file, end = self._folder / f"{number}.answer", time.monotonic() + ANSWER_S
        while not file.exists():
            if self.program.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{self._checkout} did not answer: {self.program.wait(0)}")
            time.sleep(1e-3)
        return json.loads(file.read_text())


def unpacked(build: Path, folder: Path) -> Path:
    """Return a folder to import mpiddp from: a checkout as it is, a wheel's content in ``folder``."""
    if build.suffix != ".whl":
        return build.resolve()
    with zipfile.ZipFile(build) as wheel:
        wheel.extractall(folder)
    return folder.resolve()


def import_time(checkout: Path) -> float:
    found = []
    for _ in range(IMPORTS):
        done = launcher.job(IMPORT, PYTHONPATH=str(checkout))
        if done.rc != 0:
            raise SystemExit(f"import from {checkout}: {done}")
        seconds, _, file = done.stdout.strip().partition(" ")
        of_checkout(checkout, file)
        found.append(float(seconds))
    return min(found)


def measure(checkouts: dict[str, Path], ranks: int, rounds: int, budget_s: float, figures: Figures) -> str:
    """Add the figures of some rounds of one pair of jobs, and return the MPI library."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        jobs = {build: Job(checkout, ranks, budget_s, Path(scratch, build)) for build, checkout in checkouts.items()}
        for job in jobs.values():
            stack.enter_context(job.program)
        library, bars = next(iter([job.begin() for job in jobs.values()]))
        for number in range(rounds):
            for index, bar in enumerate(bars):
                for build in BUILDS[:: -1 if (number + index) % 2 else 1]:
                    figures.setdefault(bar, {build: [] for build in BUILDS})[build].append(jobs[build].measure(bar))
        for job in jobs.values():
            job.end()
    return library


def ratios(found: Figures) -> str:
    """Return a table in microseconds, and new by old: the median of the rounds' ratios, and of the minima."""
    lines = ["| bar | old median | old min | new median | new min | new/old | of minima |", "|---|" + "---:|" * 6]
    for bar, builds in found.items():
        old, new = ((statistics.median(builds[build]), min(builds[build])) for build in BUILDS)
        times = " | ".join(f"{seconds * 1e6:,.1f}" for seconds in (*old, *new))
        ratio = statistics.median(b / a for a, b in zip(builds["old"], builds["new"], strict=True))
        lines.append(f"| {bar} | {times} | {ratio:.2f} | {new[1] / old[1]:.2f} |")
    return "\n".join(lines)


def beside(found: Figures) -> str:
    """Return a table of microseconds beyond mpi4py's call in the same job, the median of rounds."""
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
    parser = argparse.ArgumentParser(prog="python -m tests.measure.bars", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout or wheel of mpiddp")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="even numbers of ranks")
    parser.add_argument("--rounds", type=int, default=6, help="how often each build measures each bar (6)")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for a bar in a round (0.1)")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds, in seconds, to this file")
    options = parser.parse_args()
    if any(size < 2 or size % 2 for size in options.ranks):
        parser.error("the ping-pong is between pairs of ranks: expected even numbers of ranks")
    with tempfile.TemporaryDirectory() as scratch:
        builds = zip(BUILDS, (options.old, options.new), strict=True)
        compare({name: unpacked(build, Path(scratch, name)) for name, build in builds}, options)


def compare(checkouts: dict[str, Path], options: argparse.Namespace) -> None:
    library, begin = "", time.monotonic()
    figures: dict[int, Figures] = {size: {} for size in [*options.ranks, 0]}
    imports = figures[0]["import mpiddp"] = {build: [] for build in BUILDS}
    for first in range(0, options.rounds, ROUNDS_OF_JOBS):
        rounds = min(ROUNDS_OF_JOBS, options.rounds - first)
        for size in options.ranks:
            library = measure(checkouts, size, rounds, options.budget, figures[size])
        for number in range(rounds):
            for build in BUILDS[:: -1 if number % 2 else 1]:
                imports[build].append(import_time(checkouts[build]))
        print(f"{first + rounds} of {options.rounds} rounds, {time.monotonic() - begin:.0f} s", file=sys.stderr)
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

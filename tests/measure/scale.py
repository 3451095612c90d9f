"""Many ranks: ``python -m tests.measure.scale`` and ``python -m tests.measure.scale --ranks 8 16 32 [--old CHECKOUT]``.

The first prints what one rank does and keeps in made-up worlds of 1,000 and 10,000 ranks, as a Markdown table: CPU
time, the least of some runs, and memory by tracemalloc. It needs no MPI. The second starts real jobs with the MPI of
this environment, two checkouts in turn, and prints medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import made_up
import numpy as np
from harness import launcher
from made_up import work

from mpiddp.algorithms import native
from mpiddp.distributed import new_groups
from mpiddp.mpi.requests import drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


KIB = 1 << 10
SIZES = (1_000, 10_000)

Row = tuple[str, ...]
"""The work, and its cost in both worlds."""


def cpu(call: Callable[[], object], runs: int = 5) -> float:
    """Return the least CPU time of a call."""

    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(runs))


def as_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def each_size(name: str, make: Callable[[int], Callable[[], object]]) -> Row:
    times = []
    for size in SIZES:
        with made_up.mpi(size, size - 1):
            times.append(as_text(cpu(make(size))))
    return (name, *times)


def made_up_rows() -> Iterator[Row]:
    for per_node in (1, 8, 125):
        yield each_size(f"a group's link, {per_node} ranks a node", lambda n, p=per_node: work.connecting(n, p))
    yield each_size("`init_process_group`: all ranks' places, claims", lambda n: work.starting(n, 8))
    yield each_size("handshake of a long all-reduce, 8 ranks a node", lambda n: work.meeting(work.connect(n, 8)))
    growth = []
    for size in SIZES:
        with made_up.mpi(size, size - 8):
            meet = work.meeting(work.connect(size, 8))
            meet()
            growth.append(f"{work.kept(lambda meet=meet: [meet() for _ in range(work.CALLS)] and None) / KIB:.0f} KiB")
    yield (f"kept after {work.CALLS} of them", *growth)
    makers = (
        ("new_group of all", 0, new_groups.new_group),
        ("new_subgroups of 8", 8, lambda: new_groups.new_subgroups(8)),
        ("monitored_barrier on rank 0", 0, None),
    )
    for name, part, make in makers:
        times = []
        for size in SIZES:
            with made_up.default_group(size, 8) as group:
                group._link.now.part = part  # type: ignore[attr-defined]
                times.append(as_text(cpu(make or (lambda group=group: work.monitored_barrier(group)))))  # type: ignore[misc]
        yield (name, *times)
    yield each_size("questions to all ranks, before a timeout's text", work.asking)
    probes = []
    for size in SIZES:
        with made_up.mpi(size):
            comm, test = work.gathering(size)
            took = cpu(test, runs=1)
            probes.append(f"{comm.probes:,} probes, {as_text(took)}")
    yield ("gather's root: all blocks", *probes)
    polls = []
    for size in SIZES:
        with made_up.mpi(size):
            comm, test = work.gathering(size, ahead=1)
            comm.arriving = comm.arriving[-2:]  # the others are late
            test()
            polls.append(as_text(cpu(test)))
    yield ("a poll of it, while one rank is an operation ahead", *polls)


def connection_rows() -> Iterator[Row]:
    """Count messages and connections, each rank on a node of its own.

    A collective of MPI is counted as a dissemination or Bruck's algorithm, which sends to the ranks at distances 1, 2,
    4 and so on. Gloo connects each rank to all others before a group's first call; its barrier is a dissemination.
    """
    for size in (10, 100, 1_000, 10_000):
        partners = (size - 1).bit_length()
        with made_up.default_group(size, 1) as group:
            made = work.collectives(new_groups.new_group)
            waited = work.collectives(lambda group=group: drive(native.barrier(group._link)))  # type: ignore[misc]
        making, barrier = (sum((each - 1).bit_length() for each in sizes) for sizes in (made, waited))
        ours = f"{making} messages, {size * partners:,} connections", f"{barrier} messages"
        yield (
            f"{size:,}",
            *ours,
            f"{size - 1:,} connections, in all {size * (size - 1) // 2:,}",
            f"{partners} messages",
        )


def nodes_rows() -> Iterator[Row]:
    """Measure what depends on the ranks of one node, or on the nodes."""
    for last, who in ((True, "the last rank that arrives"), (False, "the first")):
        times = []
        for ranks in (8, 64, 128):
            with made_up.mpi(ranks):
                times.append(f"{ranks} ranks {work.publishing(ranks, last) * 1e6:.1f} us")
        yield (f"a call published and verified by {who}", ", ".join(times))
    with made_up.mpi(1250):
        for megabytes in (1, 32):
            sizes = work.crossing(1250, megabytes)
            # As many go back as cross; half of those that are posted are received.
            text = f"{len(sizes) / megabytes:,.0f} messages a MiB, of {statistics.median(sizes):,.0f} B"
            yield (f"a slice of {megabytes} MiB across 1,250 nodes", text)
    for size in (128, 9_984):
        own, first, scratch = (f"{each / KIB:,.0f} KiB" for each in work.memory_of_a_group(size, 128))
        text = f"Python {own}, shared {first}; scratch, on first use, {scratch}"
        yield (f"memory of a group of {size:,} ranks, 128 a node, on each", text)


def real_rows(ranks: int, checkouts: dict[str, Path], rounds: int, limit_s: float) -> Iterator[str]:
    """Run jobs of each checkout in turn, and yield a table of medians."""
    figures: dict[str, dict[str, list[float]]] = {}
    job = Path(__file__).with_name("scale_job.py")
    for number in range(rounds):
        for build in [*checkouts][:: -1 if number % 2 else 1]:
            began = time.time()
            done = launcher.job(job, ranks=ranks, limit_s=limit_s, PYTHONPATH=str(checkouts[build]))
            if done.rc != 0:
                raise SystemExit(f"{build}, {ranks} ranks: {done}")
            told = json.loads(done.stdout.splitlines()[-1])
            if not Path(told["mpiddp"]).resolve().is_relative_to(checkouts[build].resolve()):
                raise SystemExit(f"expected the mpiddp of {checkouts[build]}, but the job imported {told['mpiddp']}")
            found = {**told["figures"], "exit": began + done.seconds - told["end"], "the whole job": done.seconds}
            for name, seconds in found.items():
                figures.setdefault(name, {each: [] for each in checkouts})[build].append(seconds)
    yield f"| {ranks} ranks | " + " | ".join(checkouts) + " |"
    yield "|---|" + "---:|" * len(checkouts)
    for name, builds in figures.items():
        medians = [statistics.median(builds[build]) for build in checkouts]
        texts = [f"{each * 1e6:,.0f} us" if each < 0.001 else as_text(each) for each in medians]
        yield f"| {name} | " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.measure.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="start real jobs of so many ranks")
    parser.add_argument("--old", type=Path, help="another checkout of mpiddp, beside which they run")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each checkout (3)")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a job may take (120)")
    options = parser.parse_args()
    checkouts = {"old": options.old} if options.old else {}
    checkouts["new"] = Path(__file__).resolve().parents[2]
    for ranks in options.ranks:
        for line in real_rows(ranks, checkouts, options.rounds, options.limit):
            print(line, flush=True)
        print()
    if options.ranks:
        return
    print("| on one rank | N = 1,000 | N = 10,000 |\n|---|---|---|")
    for row in made_up_rows():
        print("| " + " | ".join(row) + " |", flush=True)
    print("\n| ranks | a group: each rank, the job at most | a barrier: each rank | Gloo's group | its barrier |")
    print("|---" * 5 + "|")
    for row in connection_rows():
        print("| " + " | ".join(row) + " |", flush=True)
    print("\n| on one rank | |\n|---|---|")
    for row in nodes_rows():
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"\nPython {sys.version.split()[0]}, NumPy {np.__version__}")


if __name__ == "__main__":
    main()

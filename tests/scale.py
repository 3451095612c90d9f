"""Many ranks: ``python -m tests.scale`` and ``python -m tests.scale --ranks 8 16 32 [--old CHECKOUT]``.

The first prints what one rank does and keeps in made-up worlds of 1,000 and 10,000 ranks, as a Markdown table: CPU
time, the least of some runs, and memory by tracemalloc. It needs no MPI. The second starts real jobs with the MPI of
this environment, two checkouts in turn, and prints medians.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import mmap
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from mpiddp.algorithms import handshake, hierarchical, native
from mpiddp.algorithms.gpu import hierarchical as gpu_hierarchical
from mpiddp.algorithms.tags import Tag
from mpiddp.distributed import monitored, new_groups
from mpiddp.faults import calls, monitor
from mpiddp.faults.calls import Calls, make_call
from mpiddp.faults.liveness import Liveness
from mpiddp.mpi import world
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import CODES, dtype_code
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import READY, drive
from mpiddp.mpi.world import Claims
from mpiddp.shm import segment
from mpiddp.shm.scratch import Scratch

from . import made_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpiddp.mpi.link import Link

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1_000, 10_000)
CALLS = 256
ANSWER = 7
"""Bytes of a block."""

Row = tuple[str, str, str, str]
"""The work, its cost in both worlds, and that of the earlier state."""


def cpu(call: Callable[[], object], runs: int = 5) -> float:
    """Return the least CPU time of a call."""

    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(runs))


def kept(call: Callable[[], object]) -> int:
    """Return the bytes that a call has allocated and, with what it returns, keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + 0 * id(result)
    finally:
        tracemalloc.stop()


def connect(size: int, per_node: int) -> Link:
    """Return the link of a group of all ranks of a made-up world."""
    comm: Any = made_up.Comm(size, size - per_node, per_node)
    return monitor.connect(made_up.job(size, per_node), comm, made_up.TIMEOUT_S)[0]


def connecting(size: int, per_node: int) -> Callable[[], object]:
    """Return what makes another link in a world that is there."""
    job = made_up.job(size, per_node)
    return lambda: monitor.connect(job, made_up.Comm(size, size - per_node, per_node), made_up.TIMEOUT_S)  # type: ignore[arg-type]


def starting(size: int, per_node: int) -> Callable[[], object]:
    """Return what gathers the world and compares the claims, unpickling all ranks' answers included."""
    comm: Any = made_up.Comm(size, size - per_node, per_node)

    def start() -> object:
        found = world.gather(comm)
        world.check_claims(comm, Claims())
        return found

    return start


def meeting(link: Link) -> Callable[[], object]:
    """Return the handshake of a long all-reduce over several nodes, with all that is read from the ranks' entries."""
    x, op = np.zeros(1), ReduceOp.SUM

    def meet() -> None:
        entries = drive(handshake.exchange(link, "all_reduce", x, op))
        entries.of(link.node_ranks)
        hierarchical.in_place_everywhere(link, entries.segments)

    return meet


def on_devices(link: Link) -> Callable[[], object]:
    """Return an all-reduce of arrays on devices, without its kernels and messages."""
    x, op = np.zeros(1), ReduceOp.SUM
    place = segment.Place(1, 0)

    def reduce() -> None:
        with (
            mock.patch.object(gpu_hierarchical.stream, "ready", lambda _: READY),
            mock.patch.object(gpu_hierarchical.cuda_ipc, "find", lambda _: place),
            mock.patch.object(gpu_hierarchical, "_where_they_lie", lambda *_: []),
            mock.patch.object(gpu_hierarchical, "_reduce", lambda *_: iter(())),
        ):
            drive(gpu_hierarchical.all_reduce(link, x, op))

    return reduce


def gathering(size: int, ahead: int = 0) -> tuple[made_up.Comm, Callable[[], bool]]:
    """Return a communicator, and what receives a block of each rank in it; so many ranks send one more, early."""
    comm = made_up.Comm(size, 0, 1)
    link = Channel(tuple(range(size)), 0, comm, comm)  # type: ignore[arg-type]
    block = np.zeros(ANSWER, np.uint8)
    comm.arriving = [(rank, Tag.BLOCK, block) for rank in range(1, size)]
    comm.arriving += [(rank, Tag.BLOCK, block) for rank in range(1, ahead + 1)]
    return comm, native._Blocks(link, {rank: block.copy() for rank in range(1, size)}).Test


def monitored_barrier(group: Any) -> None:
    """Run a monitored barrier on rank 0, whose peers have all come."""
    comm, tag = group.link.messages, group.mailbox.private_tag
    number, code = np.array([group.monitored_barriers + 1]), dtype_code(np.dtype(np.int64))
    comm.arriving = [(rank, tag * CODES + code, number) for rank in range(1, group.size())]
    with mock.patch.object(group.link, "rank", 0):
        monitored.monitored_barrier()


def asking(size: int) -> Callable[[], object]:
    """Return the questions to all ranks of a group, none of which has left yet when the last one is asked."""
    comm: Any = made_up.Comm(size, 0, 1)
    request = SimpleNamespace(Test=lambda: False)
    operation: Any = Operation("all_reduce", SimpleNamespace(number=1))
    comm.Isend = lambda *_: request
    return lambda: Liveness(comm, watched=True).ask(operation, range(size))


def publishing(ranks: int, last: bool) -> float:
    """Return the CPU time of publishing and verifying a call on a node, for the last rank that arrives or the first."""
    memory, call = mmap.mmap(-1, ranks * calls.REGION_BYTES), make_call("all_reduce", count=10)

    def seen_by(rank: int) -> Calls:
        node = Channel(tuple(range(ranks)), rank, None, None)  # type: ignore[arg-type]
        return Calls(SimpleNamespace(node=node, one_node=True), memory)  # type: ignore[arg-type]

    mine, others = seen_by(0), [seen_by(rank) for rank in range(1, ranks)]
    times = []
    for sequence in range(1, CALLS + 1):
        took, confirmed = 0.0, False
        for step in ("others", "publish") if last else ("publish", "others"):
            if step == "others":
                for each in others:
                    each.publish(sequence, call)
                continue
            start = time.thread_time()
            confirmed = mine.publish(sequence, call)
            took += time.thread_time() - start
        start = time.thread_time()
        if not confirmed:
            mine.verify(sequence)
        times.append(took + time.thread_time() - start)
    return statistics.median(times)


def crossing(nodes: int, megabytes: int) -> list[int]:
    """Return the bytes of the messages that a rank sends and receives for a piece of a slice."""
    comm = made_up.Comm(nodes, 0, 1)
    across = Channel(tuple(range(nodes)), 0, comm, comm)  # type: ignore[arg-type]
    x = np.zeros(megabytes * MIB // 4, np.float32)
    steps = hierarchical._cross(across, x, ReduceOp.SUM, lambda start, stop: x[start:stop], lambda *_: None)
    with contextlib.suppress(StopIteration):
        next(steps)
    return comm.posted


@contextlib.contextmanager
def populated() -> Iterator[list[int]]:
    """Collect the bytes of shared memory that this rank allocates."""
    found: list[int] = []
    populate = segment._populate

    def count(memory: mmap.mmap, descriptor: int, start: int, nbytes: int) -> None:
        found.append(nbytes)
        populate(memory, descriptor, start, nbytes)

    with mock.patch.object(segment, "_populate", count):
        yield found


def memory_of_a_group(size: int, per_node: int) -> tuple[int, int, int]:
    """Return the bytes of a new group on this rank: of Python, shared from the start, and of the scratch."""
    with made_up.default_group(size, per_node), populated() as found:
        groups: list[Any] = []
        own = kept(lambda: groups.append(new_groups.new_group()))
        first = sum(found)
        drive(groups[0].link.resource(Scratch).prepare())
        return own, first, sum(found) - first


def milliseconds(seconds: float) -> str:
    """Return a time as text."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def each_size(name: str, old: str, make: Callable[[int], Callable[[], object]]) -> Row:
    """Return a row of CPU times."""
    times = []
    for size in SIZES:
        with made_up.mpi(size, size - 1):
            times.append(milliseconds(cpu(make(size))))
    return (name, *times, old)  # type: ignore[return-value]


def made_up_rows() -> Iterator[Row]:
    """Measure the made-up worlds."""
    for per_node in (1, 8, 125):
        old = {1: "40 ms, 4.3 s (`_same_place` alone)"}.get(per_node, "")
        yield each_size(f"a group's link, {per_node} ranks a node", old, lambda n, p=per_node: connecting(n, p))
    yield each_size("`init_process_group`: all ranks' places, claims", "", lambda n: starting(n, 8))
    yield each_size(
        "handshake of a long all-reduce, 8 ranks a node", "1.2 ms, 15.5 ms", lambda n: meeting(connect(n, 8))
    )
    growth = []
    for size in SIZES:
        with made_up.mpi(size, size - 8):
            meet = meeting(connect(size, 8))
            meet()
            growth.append(f"{kept(lambda meet=meet: [meet() for _ in range(CALLS)] and None) / KIB:.0f} KiB")
    yield (f"kept after {CALLS} of them", *growth, "73 MiB, 724 MiB")  # type: ignore[misc]
    yield each_size("all-reduce on devices, before any message", "44 ms, 4.7 s", lambda n: on_devices(connect(n, 8)))
    makers = (
        ("new_group of all", 0, "", new_groups.new_group),
        ("new_subgroups of 8", 8, "10,000: 1.4 s", lambda: new_groups.new_subgroups(8)),
        ("monitored_barrier on rank 0", 0, "N tests a poll for each of N", None),
    )
    for name, part, old, make in makers:
        times = []
        for size in SIZES:
            with made_up.default_group(size, 8) as group:
                group.link.now.part = part  # type: ignore[attr-defined]
                times.append(milliseconds(cpu(make or (lambda group=group: monitored_barrier(group)))))  # type: ignore[misc]
        yield (name, *times, old)  # type: ignore[misc]
    yield each_size("questions to all ranks, before a timeout's text", "N^2 / 2 tests", asking)
    probes = []
    for size in SIZES:
        with made_up.mpi(size):
            comm, test = gathering(size)
            took = cpu(test, runs=1)
            probes.append(f"{comm.probes:,} probes, {milliseconds(took)}")
    yield ("gather's root: all blocks", *probes, "N - 1 a poll, each of all messages")  # type: ignore[misc]
    polls = []
    for size in SIZES:
        with made_up.mpi(size):
            comm, test = gathering(size, ahead=1)
            comm.arriving = comm.arriving[-2:]  # the others are late
            test()
            polls.append(milliseconds(cpu(test)))
    yield ("a poll of it, while one rank is an operation ahead", *polls, "")  # type: ignore[misc]


def nodes_rows() -> Iterator[Row]:
    """Measure what depends on the ranks of one node, or on the nodes."""
    for last, who in ((True, "the last rank that arrives"), (False, "the first")):
        times = []
        for ranks in (8, 64, 128):
            with made_up.mpi(ranks):
                times.append(f"{ranks} ranks {publishing(ranks, last) * 1e6:.1f} us")
        yield (f"a call published and verified by {who}", ", ".join(times), "", "8 ranks 2.7 us, 128 ranks 17 us")
    with made_up.mpi(1250):
        for megabytes in (1, 32):
            sizes = crossing(1250, megabytes)
            # As many go back as cross; half of those that are posted are received.
            text = f"{len(sizes) / megabytes:,.0f} messages a MiB, of {statistics.median(sizes):,.0f} B"
            yield (f"a slice of {megabytes} MiB across 1,250 nodes", text, "", "2,498 a MiB, of 840 B")
    for size in (128, 9_984):
        own, first, scratch = (f"{each / KIB:,.0f} KiB" for each in memory_of_a_group(size, 128))
        text = f"Python {own}, shared {first}; scratch, on first use, {scratch}"
        yield (f"memory of a group of {size:,} ranks, 128 a node, on each", text, "", "264 KiB; scratch 6.2 MiB")


def real_rows(ranks: int, checkouts: dict[str, Path], rounds: int, limit_s: float) -> Iterator[str]:
    """Run jobs of each checkout in turn, and yield a table of medians."""
    from .harness import launcher

    figures: dict[str, dict[str, list[float]]] = {}
    job = Path(__file__).with_name("scale_job.py")
    for number in range(rounds):
        for build in [*checkouts][:: -1 if number % 2 else 1]:
            env, began = {"PYTHONPATH": str(checkouts[build])}, time.time()
            done = launcher.mpirun(ranks, job, timeout_s=limit_s, env=env)
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
        texts = [f"{each * 1e6:,.0f} us" if each < 0.01 else f"{each:.2f} s" for each in medians]
        yield f"| {name} | " + " | ".join(texts) + " |"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="start real jobs of so many ranks")
    parser.add_argument("--old", type=Path, help="another checkout of mpiddp, beside which they run")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each checkout (3)")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a job may take (120)")
    options = parser.parse_args()
    checkouts = {"old": options.old} if options.old else {}
    checkouts["new"] = Path(__file__).resolve().parents[1]
    for ranks in options.ranks:
        for line in real_rows(ranks, checkouts, options.rounds, options.limit):
            print(line, flush=True)
        print()
    if options.ranks:
        return
    print("| on one rank | N = 1,000 | N = 10,000 | before |\n|---|---|---|---|")
    for row in made_up_rows():
        print("| " + " | ".join(row) + " |", flush=True)
    print("\n| on one rank | now | before |\n|---|---|---|")
    for name, now, _, before in nodes_rows():
        print(f"| {name} | {now} | {before} |", flush=True)
    print(f"\nPython {sys.version.split()[0]}, NumPy {np.__version__}")


if __name__ == "__main__":
    main()

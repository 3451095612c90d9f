"""Costs of collectives on a slow link: ``python -m tests.measure.costs [--rate 160mbit]``.

Schedules of the example ``collective_costs`` as real messages between 8 hosts (see hosts), and mpiddp's own collectives
there and on 2 hosts of 4 ranks. 160mbit and 4 MB are the example's 20 MB/s, with messages of 0.2 s instead of 5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import hosts
from harness.launcher import job

import mpiddp as dist
from mpiddp.examples import collective_costs as costs
from mpiddp.examples.collective_costs import RANKS, Rounds

ROUNDS = 3
"""In which all take turns; the median counts."""


def carry_out(name: str, rounds: Rounds, x: np.ndarray) -> None:
    """Send the messages of a schedule; ``x`` (n,), with n a multiple of 8, is this rank's array."""
    rank = dist.get_rank()
    parts = x.reshape(RANKS, -1)
    adding = len(rounds) // 2 if name.startswith("all_reduce") else len(rounds) * name.startswith("reduce")
    if "doubling" in name:
        adding = len(rounds)
    for number, messages in enumerate(rounds):
        mine = [m for m in messages if m.src == rank]
        theirs = [m for m in messages if m.dst == rank]
        coming = [np.empty((len(m.parts), parts.shape[1]), x.dtype) for m in theirs]
        works = [dist.irecv(array, m.src) for m, array in zip(theirs, coming, strict=True)]
        works += [dist.isend(parts[list(m.parts)], m.dst) for m in mine]
        for work in works:
            work.wait()
        for m, array in zip(theirs, coming, strict=True):
            if number < adding:
                parts[list(m.parts)] += array
            else:
                parts[list(m.parts)] = array


def ways(schedules: bool) -> dict[str, Callable[[np.ndarray], Any]]:
    found: dict[str, Callable[[np.ndarray], Any]] = {}
    if schedules:
        for name, rounds, ranks_per_machine in costs.table():
            if ranks_per_machine == 1 and "mpiddp" not in name:
                found[name] = lambda x, name=name, rounds=rounds: carry_out(name, rounds, x)
    found["mpiddp.broadcast"] = lambda x: dist.broadcast(x, src=0)
    found["mpiddp.reduce"] = lambda x: dist.reduce(x, dst=0)
    found["mpiddp.all_reduce"] = dist.all_reduce
    return found


def check(name: str, x: np.ndarray) -> None:
    """Compare with the right result; every rank began with its number plus one."""
    rank, total = dist.get_rank(), RANKS * (RANKS + 1) / 2
    if "broadcast" in name and "reduce" not in name:
        assert (x == 1).all(), name
    elif "all_reduce" in name or rank == 0:
        assert (x == total).all(), name


def measure_here(size_bytes: int, schedules: bool) -> None:
    """Be a rank: measure, and print on rank 0."""
    dist.init_process_group()
    took: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, way in ways(schedules).items():
            x = np.full(size_bytes // 4, dist.get_rank() + 1, np.float32)
            dist.barrier()
            began = time.perf_counter()
            way(x)
            slowest = np.array([time.perf_counter() - began])
            check(name, x)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            took.setdefault(name, []).append(float(slowest[0]))
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(seconds) for name, seconds in took.items()}))
    dist.destroy_process_group()


def measure(count: int, rate: str, size_bytes: int, schedules: bool) -> dict[str, float]:
    with hosts.Hosts(count) as some:
        some.limit(rate)
        options = ("--size", size_bytes, "--rank", *["--schedules"] * schedules)
        done = job(
            Path(__file__), *options, ranks=RANKS, on=some.block, search=[Path(__file__).parents[1]], limit_s=300
        )
    if done.rc != 0:
        raise RuntimeError(str(done))
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="160mbit", help="of every host's link, as tc takes it (160mbit)")
    parser.add_argument("--size", type=int, default=4_000_000, help="of the array in bytes (4000000)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--schedules", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure_here(given.size, given.schedules)
        return
    fault = hosts.why_not()
    if fault:
        sys.exit(fault)
    print(f"8 ranks, {given.size / 1e6:g} MB, {given.rate}, {hosts.mpi_library()}\n\n| hosts | | s |\n|---|---|---|")
    for count in (8, 2):
        for name, seconds in measure(count, given.rate, given.size, schedules=count == RANKS).items():
            print(f"| {count} | {name} | {seconds:.2f} |")


if __name__ == "__main__":
    main()

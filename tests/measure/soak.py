"""Random programs for a while: ``mpirun -np 3 python -m tests.measure.soak --minutes 30 [--seed 1]``.

In every round two threads make operations of all kinds at once, each in groups of its own, with algorithms drawn, on
ordinary and symmetric arrays, short and long. Every result is checked; so is, at the end, that memory and descriptors
have not grown since the first tenth.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from harness.random_program import RandomProgram

import mpiddp as dist

OPERATIONS = 100
"""Of each thread in a round."""
SIZES = (1, 5, 300, 20_000, 300_000)
ELEMENTS = 500_000
"""Of a group's symmetric memory."""
WARM_UP = 30
"""Rounds in which memory may grow; a run of less than twice as many says nothing of leaks."""
GROWN_MIB = 16.0
"""More is a leak: allocators keep what they had at the most."""


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class SymmetricBlocks:
    """Arrays out of each group's symmetric memory, until it is used up; ordinary ones then, and outside of groups."""

    def __init__(self, groups: list[Any]) -> None:
        outside = dist.GroupMember.NON_GROUP_MEMBER
        self._memory = [
            None if each is outside else dist.symmetric_empty(ELEMENTS, np.float64, each) for each in groups
        ]
        self._used = [0] * len(groups)

    def __call__(self, place: int, count: int) -> Any:
        """Return an array that no pending operation has."""
        memory, used = self._memory[place], self._used[place]
        if memory is None or used + count > memory.size:
            return np.empty(count)
        self._used[place] += count
        return memory[used : used + count]


def one_round(rank: int, size: int, seed: list[int]) -> None:
    """Run two programs at once, the first one's arrays in symmetric memory."""
    rng = np.random.default_rng
    first, second = (
        RandomProgram(rank, size, rng([*seed, thread]), rng([*seed, thread, rank]), sizes=SIZES) for thread in range(2)
    )
    first.allocate = SymmetricBlocks(first.groups)
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(second.run, OPERATIONS)
        first.run(OPERATIONS)
        beside.result()
    dist.barrier()
    first.destroy()
    second.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    began, rounds, early = time.monotonic(), 0, (0.0, 0)
    while True:
        share = [(time.monotonic() - began) / (60 * options.minutes)]
        dist.broadcast_object_list(share, src=0)
        if share[0] > 1 and rounds > 1:
            break
        if share[0] < 0.1 or rounds < WARM_UP:
            early = (max(early[0], memory_mib()), max(early[1], descriptors()))
        one_round(rank, size, [options.seed, rounds])
        rounds += 1
    late: list[Any] = [None] * size
    dist.all_gather_object(late, (memory_mib() - early[0], descriptors() - early[1]))
    if rank == 0:
        grown, opened = max(each[0] for each in late), max(each[1] for each in late)
        print(
            f"{size} ranks, {rounds} rounds of {2 * OPERATIONS} operations, seed {options.seed}: no wrong result;"
            f" memory {grown:+.1f} MiB, descriptors {opened:+d}",
            flush=True,
        )
        if (grown > GROWN_MIB and rounds > 2 * WARM_UP) or opened > 0:
            sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

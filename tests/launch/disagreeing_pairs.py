"""A job whose last rank makes another call than the others: many pairs, each in a group of its own.

``mpiexec -n 3 python disagreeing_pairs.py SEED FIRST LAST`` prints missed pairs and the longest time; MPICH only, for
Open MPI may crash after a mismatch. MPICH has communicators for some 300 pairs.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time

import numpy as np

import mpiddp as dist

SHORT, LONG = 4, 300_000
LIMIT_S = 20.0


def full(count, dtype=np.float32):
    return np.ones(count, dtype)


def rows(size, rank):
    return [full(SHORT) for _ in range(size)] if rank == 0 else None


def calls(rank, size):
    later = {"async_op": True}
    return {
        "all_reduce": lambda g: dist.all_reduce(full(SHORT), group=g, **later),
        "all_reduce MAX": lambda g: dist.all_reduce(full(SHORT), dist.ReduceOp.MAX, group=g, **later),
        "all_reduce int32": lambda g: dist.all_reduce(full(SHORT, np.int32), group=g, **later),
        "all_reduce of 5": lambda g: dist.all_reduce(full(5), group=g, **later),
        "all_reduce, long": lambda g: dist.all_reduce(full(LONG), group=g, **later),
        "broadcast": lambda g: dist.broadcast(full(SHORT), 0, group=g, **later),
        "broadcast of rank 1": lambda g: dist.broadcast(full(SHORT), 1, group=g, **later),
        "broadcast, long": lambda g: dist.broadcast(full(LONG), 0, group=g, **later),
        "reduce": lambda g: dist.reduce(full(SHORT), 0, group=g, **later),
        "reduce, long": lambda g: dist.reduce(full(LONG), 0, group=g, **later),
        "all_gather": lambda g: dist.all_gather([full(SHORT) for _ in range(size)], full(SHORT), group=g, **later),
        "all_gather_single": lambda g: dist.all_gather_single(full(SHORT * size), full(SHORT), group=g, **later),
        "all_gather_single, long": lambda g: dist.all_gather_single(full(LONG * size), full(LONG), group=g, **later),
        "reduce_scatter": lambda g: dist.reduce_scatter_single(full(SHORT), full(SHORT * size), group=g, **later),
        "reduce_scatter, long": lambda g: dist.reduce_scatter_single(full(LONG), full(LONG * size), group=g, **later),
        "all_to_all": lambda g: dist.all_to_all_single(full(SHORT * size), full(SHORT * size), group=g, **later),
        "barrier": lambda g: dist.barrier(group=g, **later),
        "gather": lambda g: dist.gather(full(SHORT), rows(size, rank), 0, group=g, **later),
        "scatter": lambda g: dist.scatter(full(SHORT), rows(size, rank), 0, group=g, **later),
    }


def said(call, group) -> str:
    """Make the call, then others until the ranks are found to disagree; return the error's text."""
    deadline = time.monotonic() + LIMIT_S
    try:
        call(group).wait(LIMIT_S)
        while time.monotonic() < deadline:  # found in passing, too
            time.sleep(0.03)
            dist.barrier(group, async_op=True).wait(LIMIT_S)
    except dist.MismatchError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    found = calls(rank, size)
    pairs = list(itertools.permutations(found, 2))
    random.Random(sys.argv[1]).shuffle(pairs)
    slowest_s, missed = 0.0, 0
    for one, other in pairs[int(sys.argv[2]) : int(sys.argv[3])]:
        group = dist.new_group()
        began = time.monotonic()
        text = said(found[other if rank == size - 1 else one], group)
        slowest_s = max(slowest_s, time.monotonic() - began)
        # Both calls are the first of the group.
        if "disagree: rank" not in text or text.count("#1") != 2:
            missed += 1
            print(f"rank {rank} missed {one} and {other}: {text}", flush=True)
        dist.barrier()
    print(f"rank {rank}: {missed} missed, the slowest took {slowest_s:.1f} s", flush=True)
    dist.barrier()
    time.sleep(0.3)  # MPICH's launcher kills the others at the first exit, also while it reads what they print
    os._exit(0)  # messages of mismatched calls may keep MPI_Finalize waiting


if __name__ == "__main__":
    main()

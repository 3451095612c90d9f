"""Most ranks make one call and the last one another: ``disagree.py CASE [THEN] [LATE]``; rank LATE comes later."""

import sys
import time

import numpy as np

import mpiddp as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x, y = np.ones(4, np.float32), np.ones(300_000, np.float32)
odd = rank == size - 1
mine = x.view(np.int32) if odd else x  # MPI libraries accept sums of as many bytes of another type
case, then, late = [*sys.argv[1:], "", "", ""][:3]
if late == str(rank):
    time.sleep(0.3)


def gather():
    dist.all_gather([x.copy() for _ in range(size)], x)


def forget():
    time.sleep(2)  # until the others are in MPI, where no rank can raise, however busy the machine is
    try:
        dist.barrier()
    except dist.MismatchError:
        time.sleep(30)


def in_a_sub_group():
    group = dist.new_group([0, 1])
    if rank < 2:
        arrays = [np.ones(n) for n in ((600, 700) if rank else (700, 600))]
        works.extend(dist.all_reduce(each, group=group, async_op=True) for each in arrays)
    dist.barrier()


works = []
match case:
    case "operation":
        dist.barrier() if odd else dist.all_reduce(x)
    case "count":
        dist.all_reduce(y if odd else x)
    case "dtype":
        dist.all_reduce(mine)
    case "group":
        dist.all_reduce(x) if odd else dist.new_group()
    case "algorithm":
        dist.all_reduce(np.ones(10), algorithm="ring" if odd else None)
    case "caught":
        forget() if odd else gather()
    case "a root that went on":
        gather() if odd else dist.broadcast(x, 0)
        time.sleep(1)
    # The last calls of a job, which nobody waits for.
    case "a sub-group's":
        in_a_sub_group()
    case "messages":
        dist.gather(x, None, 2) if rank == 1 else dist.scatter(x, None if rank else [x.copy(), x, x], 0)
    case "own roots" | "own roots, without eager buffers":
        dist.broadcast(x, rank)
match then:
    case "barrier":
        dist.barrier()
    case "long all_reduce":
        dist.all_reduce(y)
    case "fast loop":
        while True:
            dist.all_reduce(x)
if then:
    print("went on", flush=True)

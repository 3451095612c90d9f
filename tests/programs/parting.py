"""Three ranks whose calls part at the sixth: ``parting.py missing|mismatch|error``."""

import sys
import time

import numpy as np

import mpiddp as dist

dist.init_process_group()
rank, x = dist.get_rank(), np.ones(4)
for _ in range(3):
    dist.all_reduce(x)
group = dist.new_group([0, 1])
if rank < 2:
    dist.barrier(group)
if rank == 0:
    dist.send(x, 1, tag=3)
if rank == 1:
    dist.recv(x, 0, tag=3)
dist.all_reduce(np.ones(200_000), async_op=True).wait()


def save():
    time.sleep(60)


if sys.argv[1] == "mismatch" and rank == 1:
    dist.broadcast(x, 0)
if sys.argv[1] == "missing" and rank == 1:
    save()
if sys.argv[1] == "error" and rank == 1:
    raise KeyError("mine")
dist.all_reduce(x)
dist.all_reduce(np.ones(150_000))

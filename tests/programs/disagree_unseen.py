"""Two ranks of which neither waits when their calls differ; when they wait again, those are long past."""

import sys

import numpy as np
from mpi4py import MPI

import mpiddp as dist


def one_after_the_other(*calls):
    if rank == 1:
        MPI.COMM_WORLD.Barrier()
    for call in calls:
        call()
    if rank == 0:
        MPI.COMM_WORLD.Barrier()
    MPI.COMM_WORLD.Barrier()


dist.init_process_group()
rank = dist.get_rank()
x, y = np.full(4, float(rank)), np.zeros(4)
agreed = [lambda: dist.broadcast(y, 0)] * 2
different = {
    "broadcast": lambda: dist.broadcast(x, rank),
    "reduce": lambda: dist.reduce(x, 1 - rank),
    "mixed": lambda: dist.reduce(x, 0) if rank else dist.broadcast(x, 0),
    # Rank 0 shows its part of the coalesced call before rank 1 comes, which does not have to wait.
    "part": lambda: dist.all_reduce(x) if rank else dist.all_reduce_coalesced([x], async_op=True),
}[sys.argv[1]]
if sys.argv[1] == "part":
    agreed = []
one_after_the_other(different, *agreed)
one_after_the_other(*agreed)
for _ in range(20):
    dist.barrier()
    dist.all_reduce(np.ones(3))
print("went on", flush=True)

"""``MPIDDP_NODES=0,0,1,1 mpirun -np 4 python -m mpiddp.examples.hello``: ranks, nodes, a barrier, no MASTER_ADDR.

mpirun starts the same program four times; each process is a *rank* and knows its number. The *local rank*, within one
machine (node), chooses a GPU. ``MPIDDP_NODES`` pretends that ranks 0 and 1 run on one node, 2 and 3 on another.

A *backend* carries the bytes. In mpiddp it is MPI, whether a program asks for "mpi", for "gloo" or for none; with
"nccl" NCCL may carry arrays of GPUs. torch's processes find each other at MASTER_ADDR and MASTER_PORT; in an MPI job
the launcher has told each process its rank.

At a *barrier* early ranks wait for the others. Other collectives need no barrier before them.

Output::

    rank 0 of 4 is local rank 0 on its node; the launcher told it RANK=0 WORLD_SIZE=4
    rank 1 of 4 is local rank 1 on its node; the launcher told it RANK=1 WORLD_SIZE=4
    rank 2 of 4 is local rank 0 on its node; the launcher told it RANK=2 WORLD_SIZE=4
    rank 3 of 4 is local rank 1 on its node; the launcher told it RANK=3 WORLD_SIZE=4
    asked for None, got mpi
    asked for gloo, got mpi
    asked for carrier-pigeon: ValueError
    MASTER_ADDR is None, MASTER_PORT is None
    rank 0 reached the barrier after 0.0 s of work
    rank 1 reached the barrier after 0.1 s of work
    rank 2 reached the barrier after 0.2 s of work
    rank 3 reached the barrier after 0.3 s of work
    all arrived before the first left: True
"""

import os
import time

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once


def say_hello() -> None:
    rank, size, local = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
    told = f"RANK={os.environ['RANK']} WORLD_SIZE={os.environ['WORLD_SIZE']}"
    print_in_order(f"rank {rank} of {size} is local rank {local} on its node; the launcher told it {told}")


def ask_for_backends() -> None:
    for name in (None, "gloo"):
        dist.init_process_group(name)
        print_once(f"asked for {name}, got {dist.get_backend()}")
        dist.destroy_process_group()
    try:
        dist.init_process_group("carrier-pigeon")
    except ValueError as error:
        print_once(f"asked for carrier-pigeon: {type(error).__name__}")
    print_once(f"MASTER_ADDR is {os.environ.get('MASTER_ADDR')}, MASTER_PORT is {os.environ.get('MASTER_PORT')}")


def meet() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    work_s = 0.1 * rank
    time.sleep(work_s)
    arrived = time.monotonic()  # one clock for all ranks of a machine
    dist.barrier()
    left = time.monotonic()
    print_in_order(f"rank {rank} reached the barrier after {work_s:.1f} s of work")
    times = [(0.0, 0.0)] * size
    dist.all_gather_object(times, (arrived, left))
    print_once(f"all arrived before the first left: {max(a for a, _ in times) <= min(b for _, b in times)}")


def main() -> None:
    dist.init_process_group()
    say_hello()
    dist.destroy_process_group()
    ask_for_backends()
    dist.init_process_group()
    meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

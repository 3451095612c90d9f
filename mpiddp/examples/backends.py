"""``mpirun -np 4 python -m mpiddp.examples.backends``: what a backend is, and why nobody needs MASTER_ADDR.

A backend is what carries the bytes. torch has several: Gloo for CPUs, NCCL for GPUs, MPI where it was compiled in; one
chooses by name. Here it is always MPI, which picks the wire itself: shared memory, InfiniBand, sockets. torch's names
are accepted, so that a script need not be changed.

torch's processes do not know each other when they start. They meet at an address that one gives them (MASTER_ADDR and
MASTER_PORT, with RANK and WORLD_SIZE for each). MPI's launcher has started all processes and told each who it is: there
is nothing left to give.

Output::

    asked for None, got mpi with 4 ranks
    asked for mpi, got mpi with 4 ranks
    asked for gloo, got mpi with 4 ranks
    asked for carrier-pigeon: ValueError
    MASTER_ADDR is not needed: None, MASTER_PORT neither: None
    rank 0 knows from its launcher RANK=0 WORLD_SIZE=4
    rank 1 knows from its launcher RANK=1 WORLD_SIZE=4
    rank 2 knows from its launcher RANK=2 WORLD_SIZE=4
    rank 3 knows from its launcher RANK=3 WORLD_SIZE=4
"""

from __future__ import annotations

import os

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    """Run the example."""
    for name in (None, "mpi", "gloo"):
        dist.init_process_group(name)
        print_once(f"asked for {name}, got {dist.get_backend()} with {dist.get_world_size()} ranks")
        dist.destroy_process_group()
    refused = ""
    try:
        dist.init_process_group("carrier-pigeon")
    except ValueError as error:
        refused = type(error).__name__
    dist.init_process_group()
    print_once(f"asked for carrier-pigeon: {refused}")
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    print_once(f"MASTER_ADDR is not needed: {address}, MASTER_PORT neither: {port}")
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print_in_order(f"rank {dist.get_rank()} knows from its launcher RANK={rank} WORLD_SIZE={size}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

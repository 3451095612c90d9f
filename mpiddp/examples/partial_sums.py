"""``mpirun -np 4 python -m mpiddp.examples.partial_sums``: what reduce leaves on the other ranks.

Why do they hold partial sums after torch's reduce, and not after ours?

A sum over many ranks is made along a tree or a ring. In a tree, rank 3 sends to rank 2, which adds and sends to rank 0:
it needs memory for what it has added. The backends of torch take the caller's own array for it and leave it so; torch
promises nothing of the arrays of ranks other than ``dst``. Here they are never written: sums on the way are made
elsewhere.

Output::

    a tree in the callers' own arrays
    rank 0 had 1, now has 10, the sum
    rank 1 had 2, now has 2
    rank 2 had 3, now has 7, a partial sum
    rank 3 had 4, now has 4
    mpiddp's reduce
    rank 0 had 1, now has 10, the sum
    rank 1 had 2, now has 2
    rank 2 had 3, now has 3
    rank 3 had 4, now has 4
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def reduce_in_place(x: Array) -> None:
    """Sum ``x`` over all ranks along a tree to rank 0, in the memory of ``x``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    incoming = np.empty_like(x)
    distance = 1
    while distance < size:
        if rank % (2 * distance):
            dist.send(x, dst=rank - distance)
            return
        if rank + distance < size:
            dist.recv(incoming, src=rank + distance)
            x += incoming
        distance *= 2


def report(x: Array) -> None:
    """Print what every rank had and has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    had, has = rank + 1, int(x[0])
    kind = "" if has == had else ", the sum" if has == size * (size + 1) // 2 else ", a partial sum"
    print_in_order(f"rank {rank} had {had}, now has {has}{kind}")


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    print_once("a tree in the callers' own arrays")
    x = np.array([dist.get_rank() + 1])
    reduce_in_place(x)
    report(x)
    print_once("mpiddp's reduce")
    x = np.array([dist.get_rank() + 1])
    dist.reduce(x, dst=0)
    report(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""``mpirun -np 4 python -m mpiddp.examples.ring_all_reduce``: an all_reduce of one's own, in 30 lines.

The array is cut into as many parts as there are ranks, and every rank only ever sends to the next one. In the first
p - 1 steps each part goes around once and gathers everybody's numbers; then rank r has the whole sum of part r + 1. In
the second p - 1 steps the sums go around. Each rank sends 2 (p - 1) parts of n / p elements: never more than twice the
array, however many ranks there are.

Output::

    rank 0 has summed part 1, and sends 6 parts in all
    rank 1 has summed part 2, and sends 6 parts in all
    rank 2 has summed part 3, and sends 6 parts in all
    rank 3 has summed part 0, and sends 6 parts in all
    ours:      [10. 20. 30. 40. 50. 60. 70. 80. 90.]
    library's: [10. 20. 30. 40. 50. 60. 70. 80. 90.]
    equal on all ranks: True
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def pass_on(given: Array, taken: Array) -> None:
    """Send to the next rank of the ring while receiving from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, given, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, taken, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def ring_all_reduce(x: Array) -> None:
    """Sum a one-dimensional array over all ranks, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = np.array_split(x, size)  # views of x
    sent = 0
    for step in range(size - 1):  # gather sums
        mine, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        incoming = np.empty_like(coming)
        pass_on(mine, incoming)
        coming += incoming
        sent += 1
    done = (rank + 1) % size
    for step in range(size - 1):  # hand the sums around
        pass_on(parts[(done - step) % size], parts[(done - step - 1) % size])
        sent += 1
    print_in_order(f"rank {rank} has summed part {done}, and sends {sent} parts in all")


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank = dist.get_rank()
    ours = np.arange(1.0, 10.0) * (rank + 1)  # nine elements: parts need not be equal
    librarys = ours.copy()
    ring_all_reduce(ours)
    dist.all_reduce(librarys)
    print_once(f"ours:      {ours}\nlibrary's: {librarys}")
    equal = np.array([np.array_equal(ours, librarys)])
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    print_once(f"equal on all ranks: {bool(equal[0])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

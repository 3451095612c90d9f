"""``mpirun -np 4 python -m mpiddp.examples.point_to_point``: messages from one rank to another.

``send`` and ``recv`` block: if all ranks sent first, no rank would receive; in the chain below rank 0 begins. ``isend``
and ``irecv`` return a Work at once; until its ``wait`` do not write the sent array, nor read the received one. So all
ranks can pass something around a ring at the same time.

Output::

    blocking: a counter goes down the line
    rank 0 begins with [1]
    rank 1 received [1] and passed on [2]
    rank 2 received [2] and passed on [3]
    rank 3 received [3]
    non-blocking: all ranks send to the next and receive from the one before
    rank 0 received [30] from rank 3
    rank 1 received [0] from rank 0
    rank 2 received [10] from rank 1
    rank 3 received [20] from rank 2
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import need_ranks, print_in_order, print_once


def main() -> None:
    dist.init_process_group()
    need_ranks(2, "mpirun -np 4 python -m mpiddp.examples.point_to_point")
    rank, size = dist.get_rank(), dist.get_world_size()

    print_once("blocking: a counter goes down the line")
    counter = np.array([1])
    said = f"begins with {counter}"
    if rank > 0:
        dist.recv(counter, src=rank - 1)
        said = f"received {counter}"
    if rank < size - 1:
        if rank > 0:
            counter += 1
            said += f" and passed on {counter}"
        dist.send(counter, dst=rank + 1)
    print_in_order(f"rank {rank} {said}")

    print_once("non-blocking: all ranks send to the next and receive from the one before")
    given, taken = np.array([10 * rank]), np.empty(1, int)
    before, after = (rank - 1) % size, (rank + 1) % size
    works = [dist.isend(given, dst=after), dist.irecv(taken, src=before)]
    for work in works:
        if work:  # None outside of the group
            work.wait()
    print_in_order(f"rank {rank} received {taken} from rank {before}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

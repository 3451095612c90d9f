"""``mpirun -np 4 python -m mpiddp.examples.groups``: collectives among some of the ranks.

*All* ranks call ``new_group`` for every group, in the same order, members or not; only members call its collectives.
``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group.

Output::

    rank 0 is rank 0 of group [0, 2], where the sum of all ranks is 2
    rank 1 is rank 0 of group [1, 3], where the sum of all ranks is 4
    rank 2 is rank 1 of group [0, 2], where the sum of all ranks is 2
    rank 3 is rank 1 of group [1, 3], where the sum of all ranks is 4
    rank 0 asks for its number in a group that it is not in: -1
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import need_ranks, print_in_order, print_once


def main() -> None:
    dist.init_process_group()
    need_ranks(2, "mpirun -np 4 python -m mpiddp.examples.groups")
    rank, size = dist.get_rank(), dist.get_world_size()

    even = dist.new_group(range(0, size, 2))
    odd = dist.new_group(range(1, size, 2))
    mine, other = (odd, even) if rank % 2 else (even, odd)

    x = np.array([rank])
    dist.all_reduce(x, group=mine)
    members = dist.get_process_group_ranks(mine)  # type: ignore[arg-type]
    number = dist.get_rank(mine)
    print_in_order(f"rank {rank} is rank {number} of group {members}, where the sum of all ranks is {x[0]}")
    print_once(f"rank 0 asks for its number in a group that it is not in: {dist.get_rank(other)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

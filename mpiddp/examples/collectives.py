"""``mpirun -np 4 python -m mpiddp.examples.collectives``: data before and after each collective, and groups of ranks.

The pictures are drawn from the arrays; the tens digit of a number is the rank that the number comes from.
``all_gather`` needs memory of the right shapes, so ranks with arrays of different lengths exchange the lengths first.
``all_gather_object`` needs no lengths, but it pickles.

*All* ranks call ``new_group`` for every group, in the same order, also ranks that are not in the group. Only members
call the collectives of the group. ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the
group.

Output::

    broadcast(x, src=0): the array of rank 0 goes to all
      rank 0   0  1  2  3  ->   0  1  2  3
      rank 1  10 11 12 13  ->   0  1  2  3
      rank 2  20 21 22 23  ->   0  1  2  3
      rank 3  30 31 32 33  ->   0  1  2  3
    scatter(part, list(x), src=0): rank 0 deals out its parts
      rank 0   0  1  2  3  ->   0
      rank 1               ->   1
      rank 2               ->   2
      rank 3               ->   3
    gather(part, parts, dst=0): rank 0 collects a part from each
      rank 0   0           ->   0 10 20 30
      rank 1  10           ->
      rank 2  20           ->
      rank 3  30           ->
    all_gather(parts, part): all collect a part from each
      rank 0   0           ->   0 10 20 30
      rank 1  10           ->   0 10 20 30
      rank 2  20           ->   0 10 20 30
      rank 3  30           ->   0 10 20 30
    reduce(x, dst=0): rank 0 gets the sum, the others keep what they have
      rank 0   0  1  2  3  ->  60 64 68 72
      rank 1  10 11 12 13  ->  10 11 12 13
      rank 2  20 21 22 23  ->  20 21 22 23
      rank 3  30 31 32 33  ->  30 31 32 33
    all_reduce(x): all get the sum
      rank 0   0  1  2  3  ->  60 64 68 72
      rank 1  10 11 12 13  ->  60 64 68 72
      rank 2  20 21 22 23  ->  60 64 68 72
      rank 3  30 31 32 33  ->  60 64 68 72
    all_reduce(x, op=ReduceOp.MAX): all get the largest
      rank 0   0  1  2  3  ->  30 31 32 33
      rank 1  10 11 12 13  ->  30 31 32 33
      rank 2  20 21 22 23  ->  30 31 32 33
      rank 3  30 31 32 33  ->  30 31 32 33
    reduce_scatter(part, list(x)): the sum is made and dealt out
      rank 0   0  1  2  3  ->  60
      rank 1  10 11 12 13  ->  64
      rank 2  20 21 22 23  ->  68
      rank 3  30 31 32 33  ->  72
    all_to_all(parts, list(x)): all deal out their parts, rows become columns
      rank 0   0  1  2  3  ->   0 10 20 30
      rank 1  10 11 12 13  ->   1 11 21 31
      rank 2  20 21 22 23  ->   2 12 22 32
      rank 3  30 31 32 33  ->   3 13 23 33
    all_gather of different lengths
      too little room is an error: all_gather needs shape (1,) as `tensor_list[0]`, got (2,)
      the lengths, by all_gather_single: [1, 2, 3, 4]
      rank 0 has [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
      rank 1 has [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
      rank 2 has [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
      rank 3 has [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
      all_gather_object gives the same: True
    groups
      rank 0 is rank 0 of group [0, 2], where the sum of all ranks is 2, and -1 of [1, 3]
      rank 1 is rank 0 of group [1, 3], where the sum of all ranks is 4, and -1 of [0, 2]
      rank 2 is rank 1 of group [0, 2], where the sum of all ranks is 2, and -1 of [1, 3]
      rank 3 is rank 1 of group [1, 3], where the sum of all ranks is 4, and -1 of [0, 2]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def draw(title: str, before: Sequence[Array] | Array, after: Sequence[Array] | Array) -> None:
    print_once(title)
    print_in_order(f"  rank {dist.get_rank()}  {numbers(before)}  ->  {numbers(after)}".rstrip())


def numbers(values: Sequence[Array] | Array) -> str:
    return " ".join(f"{int(value):2}" for value in np.ravel(values)).ljust(3 * dist.get_world_size() - 1)


def room() -> list[Any]:
    """Return memory for one number from each rank."""
    return [np.empty(1, int) for _ in range(dist.get_world_size())]


def gather_different_lengths() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = np.full(rank + 1, rank)  # (rank + 1,)
    print_once("all_gather of different lengths")
    try:
        dist.all_gather([np.empty(rank + 2, int) for _ in range(size)], mine)
    except dist.ArrayError as error:
        print_once(f"  too little room is an error: {error}")
    lengths = np.empty(size, int)
    dist.all_gather_single(lengths, np.array([len(mine)]))
    print_once(f"  the lengths, by all_gather_single: {lengths.tolist()}")
    arrays: list[Any] = [np.empty(length, int) for length in lengths]
    dist.all_gather(arrays, mine)
    print_in_order(f"  rank {rank} has {[x.tolist() for x in arrays]}")
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, mine)
    same = all(np.array_equal(x, y) for x, y in zip(arrays, objects, strict=True))
    print_once(f"  all_gather_object gives the same: {same}")


def reduce_in_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [list(range(first, size, 2)) for first in range(min(size, 2))]
    groups = [dist.new_group(ranks) for ranks in members]
    mine, other = rank % 2, (rank + 1) % len(members)
    x = np.array([rank])
    dist.all_reduce(x, group=groups[mine])
    print_once("groups")
    print_in_order(
        f"  rank {rank} is rank {dist.get_rank(groups[mine])} of group {members[mine]}, where the sum of all ranks is"
        f" {x[0]}, and {dist.get_rank(groups[other])} of {members[other]}"
    )


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    original = 10 * rank + np.arange(size)  # (size,)
    original_parts: list[Any] = [original[i : i + 1] for i in range(size)]  # one for each rank
    own = original_parts[0]

    x = original.copy()
    dist.broadcast(x, src=0)
    draw("broadcast(x, src=0): the array of rank 0 goes to all", original, x)

    part = np.empty(1, int)
    dealt = original_parts if rank == 0 else None
    dist.scatter(part, dealt, src=0)
    draw("scatter(part, list(x), src=0): rank 0 deals out its parts", dealt or [], part)

    collected = room() if rank == 0 else None
    dist.gather(own, collected, dst=0)
    draw("gather(part, parts, dst=0): rank 0 collects a part from each", own, collected or [])

    parts = room()
    dist.all_gather(parts, own)
    draw("all_gather(parts, part): all collect a part from each", own, parts)

    x = original.copy()
    dist.reduce(x, dst=0)
    draw("reduce(x, dst=0): rank 0 gets the sum, the others keep what they have", original, x)

    x = original.copy()
    dist.all_reduce(x)
    draw("all_reduce(x): all get the sum", original, x)

    x = original.copy()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    draw("all_reduce(x, op=ReduceOp.MAX): all get the largest", original, x)

    part = np.empty(1, int)
    dist.reduce_scatter(part, original_parts)
    draw("reduce_scatter(part, list(x)): the sum is made and dealt out", original, part)

    parts = room()
    dist.all_to_all(parts, original_parts)
    draw("all_to_all(parts, list(x)): all deal out their parts, rows become columns", original, parts)
    gather_different_lengths()
    reduce_in_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

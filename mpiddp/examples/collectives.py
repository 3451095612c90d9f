"""``mpirun -np 4 python -m mpiddp.examples.collectives``: who has what, before and after each collective.

All ranks of a group call a collective together. The pictures are drawn from the arrays themselves; the tens digit of a
number says which rank it comes from.

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
    all_to_all(parts, list(x)): everybody deals out its parts, rows become columns
      rank 0   0  1  2  3  ->   0 10 20 30
      rank 1  10 11 12 13  ->   1 11 21 31
      rank 2  20 21 22 23  ->   2 12 22 32
      rank 3  30 31 32 33  ->   3 13 23 33
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def draw(title: str, before: Sequence[Array] | Array, after: Sequence[Array] | Array) -> None:
    """Print what every rank had before a collective and has after it."""
    print_once(title)
    print_in_order(f"  rank {dist.get_rank()}  {numbers(before)}  ->  {numbers(after)}".rstrip())


def numbers(values: Sequence[Array] | Array) -> str:
    """Return integers in a row, as wide for few as for many."""
    return " ".join(f"{int(value):2}" for value in np.ravel(values)).ljust(3 * dist.get_world_size() - 1)


def places() -> list[Any]:
    """Return memory for a number from each rank."""
    return [np.empty(1, int) for _ in range(dist.get_world_size())]


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    original = 10 * rank + np.arange(size)  # (size,), what this rank begins with
    original_parts: list[Any] = [original[i : i + 1] for i in range(size)]  # one for each rank
    own = original_parts[0]

    x = original.copy()
    dist.broadcast(x, src=0)
    draw("broadcast(x, src=0): the array of rank 0 goes to all", original, x)

    part = np.empty(1, int)
    dealt = original_parts if rank == 0 else None
    dist.scatter(part, dealt, src=0)
    draw("scatter(part, list(x), src=0): rank 0 deals out its parts", dealt or [], part)

    collected = places() if rank == 0 else None
    dist.gather(own, collected, dst=0)
    draw("gather(part, parts, dst=0): rank 0 collects a part from each", own, collected or [])

    parts = places()
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

    parts = places()
    dist.all_to_all(parts, original_parts)
    draw("all_to_all(parts, list(x)): everybody deals out its parts, rows become columns", original, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

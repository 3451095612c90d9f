"""``mpirun -np 4 python -m mpiddp.examples.unknown_shapes``: all_gather of arrays of unknown shapes.

Must I know the shapes before? Yes: memory for what comes has to be there before it comes. Where ranks have
different amounts, they tell each other how much first, in a message of one number; then all know the shapes. Or one
sends objects: ``all_gather_object`` needs no shapes, because it does just that, at the price of pickling.

Output::

    too little room is an error: all_gather needs shape (1,) as `tensor_list[0]`, got (2,)
    everybody knows the lengths: [1, 2, 3, 4]
    rank 0 has [array([0]), array([1, 1]), array([2, 2, 2]), array([3, 3, 3, 3])]
    rank 1 has [array([0]), array([1, 1]), array([2, 2, 2]), array([3, 3, 3, 3])]
    rank 2 has [array([0]), array([1, 1]), array([2, 2, 2]), array([3, 3, 3, 3])]
    rank 3 has [array([0]), array([1, 1]), array([2, 2, 2]), array([3, 3, 3, 3])]
    all_gather_object gives the same: True
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = np.full(rank + 1, rank)  # (rank + 1,)

    try:
        dist.all_gather([np.empty(rank + 2, int)] * size, mine)
    except dist.ArrayError as error:
        print_once(f"too little room is an error: {error}")

    lengths = np.empty(size, int)
    dist.all_gather_single(lengths, np.array([len(mine)]))
    print_once(f"everybody knows the lengths: {lengths.tolist()}")
    arrays: list[Any] = [np.empty(length, int) for length in lengths]
    dist.all_gather(arrays, mine)
    print_in_order(f"rank {rank} has {arrays}")

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, mine)
    same = all(np.array_equal(x, y) for x, y in zip(arrays, objects, strict=True))
    print_once(f"all_gather_object gives the same: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

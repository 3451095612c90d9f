"""``mpirun -np 2 python -m mpiddp.examples.set_epoch``: the same order in every epoch, and its cure.

All ranks shuffle alike, by the seed and the number of the epoch, which only the program knows. Without ``set_epoch``
each rank sees the same batches in the same order for ever, and never a sample of the other ranks; mpiddp's sampler
warns.

Output::

    without set_epoch
    rank 0: epoch 0 [4, 7, 2, 1], epoch 1 [4, 7, 2, 1], epoch 2 [4, 7, 2, 1]
    rank 1: epoch 0 [0, 3, 5, 6], epoch 1 [0, 3, 5, 6], epoch 2 [0, 3, 5, 6]
    the sampler warns: epoch 0 was iterated a second time, in the same order
    with set_epoch
    rank 0: epoch 0 [4, 7, 2, 1], epoch 1 [5, 2, 7, 1], epoch 2 [0, 7, 6, 1]
    rank 1: epoch 0 [0, 3, 5, 6], epoch 1 [4, 6, 3, 0], epoch 2 [4, 2, 5, 3]
"""

from __future__ import annotations

import warnings

import mpiddp as dist
from mpiddp.data import DistributedSampler
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    dist.init_process_group()
    rank, data = dist.get_rank(), range(8)

    print_once("without set_epoch")
    sampler = DistributedSampler(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = ", ".join(f"epoch {epoch} {list(sampler)}" for epoch in range(3))
    print_in_order(f"rank {rank}: {seen}")
    print_once(f"the sampler warns: {str(caught[0].message).split(';')[0]}")

    print_once("with set_epoch")
    sampler = DistributedSampler(data)
    said = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        said.append(f"epoch {epoch} {list(sampler)}")
    print_in_order(f"rank {rank}: {', '.join(said)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

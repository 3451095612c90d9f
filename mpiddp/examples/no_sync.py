"""``mpirun -np 2 python -m mpiddp.examples.no_sync``: gradients of several batches, sent once.

A batch that does not fit into memory is cut into micro batches whose gradients add up. Averaging after each of them
would send the same bytes again and again; under ``no_sync`` they stay here, and the first backward outside of it
averages the whole sum. Forward has to stand inside of the block too. Watch ``p.grad``: local sums differ from rank to
rank, the average does not. ``p.data`` changes in ``optimizer.step`` alone.

The loss is ``w * x``, so that its gradient is ``x``: 1, 2, 3 on rank 0 and 10, 20, 30 on rank 1.

Output::

    micro batch 1, no_sync
    rank 0: p.grad [[1.]], p.data [[0.]]
    rank 1: p.grad [[10.]], p.data [[0.]]
    micro batch 2, no_sync
    rank 0: p.grad [[3.]], p.data [[0.]]
    rank 1: p.grad [[30.]], p.data [[0.]]
    micro batch 3, which sends the sum
    rank 0: p.grad [[33.]], p.data [[0.]]
    rank 1: p.grad [[33.]], p.data [[0.]]
    optimizer.step
    rank 0: p.grad [[33.]], p.data [[-33.]]
    rank 1: p.grad [[33.]], p.data [[-33.]]
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data[...] = 0
    ddp = dist.DistributedDataParallel(model)
    optimizer = optim.SGD(ddp.parameters(), lr=1.0)
    p = model.weight
    micro_batches = [np.full((1, 1), x * 10**rank, np.float32) for x in (1, 2, 3)]

    with ddp.no_sync():
        for number, x in enumerate(micro_batches[:-1], 1):
            ddp(x).sum().backward()
            print_once(f"micro batch {number}, no_sync")
            print_in_order(f"rank {rank}: p.grad {p.grad}, p.data {p.data}")
    ddp(micro_batches[-1]).sum().backward()
    print_once("micro batch 3, which sends the sum")
    print_in_order(f"rank {rank}: p.grad {p.grad}, p.data {p.data}")
    optimizer.step()
    print_once("optimizer.step")
    print_in_order(f"rank {rank}: p.grad {p.grad}, p.data {p.data}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

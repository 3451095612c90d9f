"""``mpirun -np 4 python -m mpiddp.examples.uneven_inputs``: ranks with different numbers of batches, by join.

Rank 0 has one batch, rank 3 has four. Without ``join`` every backward would wait for finished ranks until the timeout;
inside of it these answer with zeros, and at the end get the model of the rank with most batches. Every gradient is 1,
and so is the learning rate: the averages are 4 / 4, 3 / 4, 2 / 4, 1 / 4.

Output::

    rank 0: weight after each of its batches -1.00
    rank 1: weight after each of its batches -1.00 -1.75
    rank 2: weight after each of its batches -1.00 -1.75 -2.25
    rank 3: weight after each of its batches -1.00 -1.75 -2.25 -2.50
    after join
    rank 0: weight -2.50
    rank 1: weight -2.50
    rank 2: weight -2.50
    rank 3: weight -2.50
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data[...] = 0
    ddp = dist.DistributedDataParallel(model)
    optimizer = optim.SGD(ddp.parameters(), lr=1.0)
    batches = [np.ones((1, 1), np.float32)] * (rank + 1)

    weights = []
    with dist.Join([ddp]):
        for x in batches:
            optimizer.zero_grad()
            ddp(x).sum().backward()
            optimizer.step()
            weights.append(model.weight.item())
    print_in_order(f"rank {rank}: weight after each of its batches {' '.join(f'{weight:.2f}' for weight in weights)}")
    print_once("after join")
    print_in_order(f"rank {rank}: weight {model.weight.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

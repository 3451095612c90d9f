"""``mpirun -np 2 python -m mpiddp.examples.gradients``: why gradients are divided by the world size, and no_sync.

A loss is a *mean* over its batch. The mean over the whole batch is the sum of the ranks' means divided by the number of
ranks. Without the division the sum of two ranks doubles the learning rate: 0.6 finds the weight 1, while 1.2 overshoots
by more at every step.

A large batch is cut into micro batches whose gradients add up. If forward and backward run under ``no_sync``, the
gradients stay on the rank. The first backward outside of ``no_sync`` sends and averages the whole sum once. The output
shows ``p.grad`` for the loss ``w * x``, whose gradient is ``x``: 1, 2, 3 on rank 0, and 10, 20, 30 on rank 1. Only
``optimizer.step`` changes ``p.data``.

Output::

    gradient of one process on the whole batch: -2.000
    sum over 2 ranks:                           -4.000
    sum divided by the world size:              -2.000
    w after each step, with the average: 1.200 0.960 1.008 0.998
    w after each step, with the sum:     2.400 -0.960 3.744 -2.842
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

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def new_model() -> nn.Linear:
    """Return the model ``w * x`` with w = 0."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data[...] = 0
    return model


def gradient(model: nn.Linear, x: Array) -> Array:
    """Return the gradient of the mean squared error between ``w * x`` and ``x``."""
    model.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def train(x: Array, divisor: int) -> list[float]:
    """Return w after each of four steps."""
    model = new_model()
    optimizer = optim.SGD(model.parameters(), lr=0.6)
    weights = []
    for _ in range(4):
        grad = gradient(model, x)
        dist.all_reduce(grad)
        grad /= divisor
        optimizer.step()
        weights.append(model.weight.item())
    return weights


def divide() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = np.where(np.arange(8 * size) % 2, 1, -1).reshape(-1, 1).astype(np.float32)  # (8 * ranks, 1)
    mine = whole[8 * rank : 8 * (rank + 1)]
    print_once(f"gradient of one process on the whole batch: {gradient(new_model(), whole).item():.3f}")
    summed = gradient(new_model(), mine)
    dist.all_reduce(summed)
    print_once(f"sum over {size} ranks:                           {summed.item():.3f}")
    print_once(f"sum divided by the world size:              {summed.item() / size:.3f}")
    for name, divisor in (("average:", size), ("sum:    ", 1)):
        print_once(f"w after each step, with the {name} {' '.join(f'{w:.3f}' for w in train(mine, divisor))}")


def accumulate() -> None:
    model = new_model()
    ddp = dist.DistributedDataParallel(model)
    optimizer = optim.SGD(ddp.parameters(), lr=1.0)

    def show(title: str) -> None:
        print_once(title)
        print_in_order(f"rank {dist.get_rank()}: p.grad {model.weight.grad}, p.data {model.weight.data}")

    micro_batches = [np.full((1, 1), x * 10 ** dist.get_rank(), np.float32) for x in (1, 2, 3)]
    with ddp.no_sync():
        for number, x in enumerate(micro_batches[:-1], 1):
            ddp(x).sum().backward()
            show(f"micro batch {number}, no_sync")
    ddp(micro_batches[-1]).sum().backward()
    show("micro batch 3, which sends the sum")
    optimizer.step()
    show("optimizer.step")


def main() -> None:
    dist.init_process_group()
    divide()
    accumulate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

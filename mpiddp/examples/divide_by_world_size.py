"""``mpirun -np 4 python -m mpiddp.examples.divide_by_world_size``: why gradients are divided by it.

A loss is a *mean* over its batch. Each rank has a quarter of the batch and takes the mean over its quarter; the mean
over the whole batch is the mean of these four means: their sum divided by four. The sum alone is the gradient of a loss
four times as steep, and with it a learning rate that is right for one process is four times too large.

A learning rate of 0.4 finds the weight, which is 1, with the average. With the sum of four ranks it acts as 1.6: every
step overshoots by more than the last.

Output::

    gradient of one process on the whole batch: -2.000
    sum over 4 ranks:                           -8.000
    sum divided by the world size:              -2.000
    w after each step, with the average: 0.800 0.960 0.992 0.998
    w after each step, with the sum:     3.200 -3.840 11.648 -22.426
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.examples.printing import print_once
from mpiddp.typing import Array


def new_model() -> nn.Linear:
    """Return ``w * x`` with w = 0."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data[...] = 0
    return model


def gradient(model: nn.Linear, x: Array) -> Array:
    """Return the gradient of the mean squared error of ``w * x``, which should be ``x``."""
    model.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def train(x: Array, divisor: int) -> list[float]:
    """Return w after each of four steps."""
    model = new_model()
    optimizer = optim.SGD(model.parameters(), lr=0.4)
    weights = []
    for _ in range(4):
        grad = gradient(model, x)
        dist.all_reduce(grad)
        grad /= divisor
        optimizer.step()
        weights.append(model.weight.item())
    return weights


def main() -> None:
    """Run the example."""
    dist.init_process_group()
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

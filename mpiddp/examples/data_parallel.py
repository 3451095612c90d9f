"""``python -m mpiddp.examples.data_parallel``: one process, one batch cut into parts, no ranks.

Threads run the model on parts of the batch; the gradients add up in the one set of parameters. DataParallel needs no
launcher; DistributedDataParallel is faster in all else, for threads share an interpreter and the first device collects.

Output::

    a batch of 30 images went through the model in parts of [30]
    a batch of 30 images went through the model in parts of [15, 15]
    a batch of 30 images went through the model in parts of [10, 10, 10]
    the outputs are one batch again: (30, 2)
    outputs are those of the model alone: True
    gradients are those of the model alone: True
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.examples.printing import print_once


class Counting(nn.Module):
    """A linear map that records its batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.sizes: list[int] = []

    def forward(self, x: Any) -> Tensor:
        self.sizes.append(len(x))
        return self.linear(x)  # type: ignore[no-any-return]


def main() -> None:
    images = np.random.default_rng(0).standard_normal((30, 5), np.float32)
    model = Counting()
    alone = model(images)
    alone.sum().backward()
    expected = np.array(model.linear.weight.grad)

    for devices in (1, 2, 3):
        model.zero_grad()
        model.sizes.clear()
        parallel = dist.DataParallel(model, device_ids=["cpu"] * devices)  # or [0, 1, 2], the numbers of GPUs
        output = parallel(images)
        output.sum().backward()
        print_once(f"a batch of 30 images went through the model in parts of {sorted(model.sizes, reverse=True)}")
    found = np.array(model.linear.weight.grad)
    print_once(f"the outputs are one batch again: {output.shape}")
    print_once(f"outputs are those of the model alone: {np.allclose(output.data, alone.data)}")
    print_once(f"gradients are those of the model alone: {np.allclose(found, expected, rtol=1e-5)}")


if __name__ == "__main__":
    main()

"""``python -m mpiddp.examples.data_parallel``: one process, one batch cut into parts, no ranks.

DataParallel is the older way: threads of one process run the model on parts of the batch and the gradients add up in
the one set of parameters. It asks for no launcher, and that is its only advantage: threads share one interpreter and
one machine, and the first device does the work of collecting. DistributedDataParallel is faster everywhere else.

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


class Counting(nn.Module):
    """A linear map that takes note of the size of each batch it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.sizes: list[int] = []

    def forward(self, x: Any) -> Tensor:
        """Return the map of ``x`` (n, 5)."""
        self.sizes.append(len(x))
        return self.linear(x)  # type: ignore[no-any-return]


def main() -> None:
    """Run the example."""
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
        print(f"a batch of 30 images went through the model in parts of {sorted(model.sizes, reverse=True)}")
    found = np.array(model.linear.weight.grad)
    print(f"the outputs are one batch again: {output.shape}")
    print(f"outputs are those of the model alone: {np.allclose(output.data, alone.data)}")
    print(f"gradients are those of the model alone: {np.allclose(found, expected, rtol=1e-5)}")


if __name__ == "__main__":
    main()

"""``Flatten``, the layer that joins axes."""

from typing import Any

from mpiddp.autograd import Tensor

from .module import Layer


class Flatten(Layer):
    """A layer that joins the axes from ``start_dim`` to ``end_dim``, by default all axes but the batch's."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Any) -> Tensor:
        tensor = input if isinstance(input, Tensor) else Tensor(input)
        return tensor.flatten(self.start_dim, self.end_dim)

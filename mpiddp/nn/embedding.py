"""Embedding: function and layer."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.function import expect_array_or_option
from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.half import widened
from mpiddp.typing import Array, DTypeLike

from . import init
from .module import Module
from .parameter import Parameter


class EmbeddingFunction(Function):
    def forward(self, weight: Array, index: Array) -> Array:
        self.index, self.shape = index, weight.shape
        if not is_device_array(index):
            return weight[index]
        xp = array_namespace(index)
        wrong = (index < 0) | (index >= len(weight))
        self.index = xp.where(wrong, 0, index)
        return xp.where(wrong[..., None], weight.dtype.type(math.nan), weight[self.index])

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        wide = widened(grad)
        table = self.out(0) if wide is grad else None
        if table is None:
            table = xp.empty(self.shape, dtype=wide.dtype)
        table.fill(0)
        xp.add.at(table, self.index.ravel(), wide.reshape(-1, self.shape[1]))
        return table


def embedding(input: Any, weight: Any) -> Tensor:
    """Return the rows of ``weight`` (rows, length) that the integers ``input`` name.

    A number that is no row raises IndexError. On a GPU, where a check would have to wait, its row is NaN.
    """
    index = input.data if isinstance(input, Tensor) else input
    expect_array_or_option(index)
    if index.dtype.kind not in "iu":
        raise RuntimeError(f"expected integers as input of embedding, got {index.dtype}")
    if not is_device_array(index) and index.size and (index.min() < 0 or index.max() >= weight.shape[0]):
        raise IndexError(
            f"index out of range in self: rows are 0 to {weight.shape[0] - 1}, got {index.min()} to {index.max()}"
        )
    return EmbeddingFunction.apply(weight, index)


class Embedding(Module):
    """A table of learned vectors, normally distributed at first."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, dtype: DTypeLike = np.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter(np.empty((num_embeddings, embedding_dim), dtype))
        init.normal_(self.weight)

    def forward(self, input: Any) -> Tensor:
        return embedding(input, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"

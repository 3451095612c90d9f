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
    def forward(self, weight: Array, index: Array, padding_idx: int | None) -> Array:
        self.index, self.padding_idx, self.shape = index, padding_idx, weight.shape
        if not is_device_array(index):
            return weight[index]
        # Checking would wait for the device: numbers that are no rows give NaN.
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
        if self.padding_idx is not None:
            table[self.padding_idx] = 0
        return table


def embedding(input: Any, weight: Any, padding_idx: int | None = None) -> Tensor:
    """Return the rows of ``weight`` (rows, length) that integers name; row ``padding_idx`` gets no gradient.

    A number that is no row raises IndexError; on a GPU, where checking would wait, it gives NaN.
    """
    index = input.data if isinstance(input, Tensor) else input
    expect_array_or_option(index)
    if index.dtype.kind not in "iu":
        raise RuntimeError(f"expected integers as input of embedding, got {index.dtype}")
    if not is_device_array(index) and index.size and (index.min() < 0 or index.max() >= weight.shape[0]):
        raise IndexError(
            f"index out of range in self: rows are 0 to {weight.shape[0] - 1}, got {index.min()} to {index.max()}"
        )
    return EmbeddingFunction.apply(weight, index, padding_idx)


class Embedding(Module):
    """A table of learned vectors, normally distributed at first; row ``padding_idx`` is zeros without a gradient."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"Padding_idx must be within num_embeddings, got {padding_idx} for {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.weight = Parameter(np.empty((num_embeddings, embedding_dim), dtype))
        init.normal_(self.weight)
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    def forward(self, input: Any) -> Tensor:
        return embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        return text if self.padding_idx is None else f"{text}, padding_idx={self.padding_idx}"

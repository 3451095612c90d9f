"""Rows of a table by their numbers. Imports ``autograd``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.half import widened
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array


class Embedding(Function):
    """``weight[index]``; a row that is taken several times gets the sum of the gradients."""

    def forward(self, weight: Array, index: Array, padding_idx: int | None) -> Array:
        self.index, self.padding_idx, self.shape = index, padding_idx, weight.shape
        if not is_device_array(index):
            return weight[index]
        # Where nobody has looked whether the numbers are rows: those that are none give NaN.
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
    """Return the rows of ``weight`` (number, length) that the integers in ``input`` name.

    Parameters
    ----------
    input : array or Tensor
        Integers of any shape.
    weight : array or Tensor
        The table.
    padding_idx : int, optional
        A row that gets no gradient.

    Raises
    ------
    IndexError
        A number is no row. On a GPU, where looking would be waiting, NaN comes out instead.
    """
    index = input.data if isinstance(input, Tensor) else input
    if index.dtype.kind not in "iu":
        raise RuntimeError(f"expected integers as input of embedding, got {index.dtype}")
    if not is_device_array(index) and index.size and (index.min() < 0 or index.max() >= weight.shape[0]):
        raise IndexError(
            f"index out of range in self: rows are 0 to {weight.shape[0] - 1}, got {index.min()} to {index.max()}"
        )
    return Embedding.apply(weight, index, padding_idx)

"""Reductions over axes: sum, mean, max and min, and what they have in common.

Imports ``function``. ``dim`` is None (all axes), an axis or several.
"""
# ruff: noqa: D102 (forward and backward are Function's)

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.device import array_namespace
from mpiddp.typing import Array, Shape

from .function import Function

Dim = int | tuple[int, ...] | list[int] | None


def _axes(dim: Dim) -> int | tuple[int, ...] | None:
    """Return ``dim`` as NumPy wants it; torch's empty list is all axes."""
    return tuple(dim) or None if isinstance(dim, tuple | list) else dim


def _kept(shape: Shape, dim: Dim) -> Shape:
    """Return ``shape`` with length 1 along the reduced axes."""
    if dim is None:
        return (1,) * len(shape)
    axes = {d % len(shape) for d in (dim if isinstance(dim, tuple | list) else (dim,))} if shape else set()
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


class Sum(Function):
    """The sum over axes."""

    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        dim = _axes(dim)
        self.shape, self.kept = a.shape, _kept(a.shape, dim)
        return a.sum(axis=dim, keepdims=keepdim)

    def backward(self, grad: Array) -> Array:
        return array_namespace(grad).broadcast_to(grad.reshape(self.kept), self.shape)


class Mean(Sum):
    """The mean over axes."""

    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        result = super().forward(a, dim, keepdim)
        self.count = max(a.size // max(result.size, 1), 1)
        return result / self.count

    def backward(self, grad: Array) -> Array:
        return super().backward(grad / self.count)


class Extreme(Function):
    """The largest (``sign`` 1) or smallest (-1) value over axes; equal ones share the gradient."""

    def forward(self, a: Array, dim: Dim, keepdim: bool, sign: int) -> Any:
        dim = _axes(dim)
        self.a, self.kept = a, _kept(a.shape, dim)
        result = a.max(axis=dim, keepdims=keepdim) if sign > 0 else a.min(axis=dim, keepdims=keepdim)
        self.result = result.reshape(self.kept)
        self.dim = dim
        return result

    def backward(self, grad: Array) -> Array:
        winners = self.a == self.result
        share = grad.reshape(self.kept) / winners.sum(axis=self.dim, keepdims=True).astype(grad.dtype)
        return winners * share


class TakeAlong(Function):
    """The elements at ``index`` (integers, one for each line along ``dim``), with that axis kept."""

    def forward(self, a: Array, index: Array, dim: int) -> Any:
        self.index, self.dim, self.shape = index, dim, a.shape
        return array_namespace(a).take_along_axis(a, index, axis=dim)

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        result = xp.zeros(self.shape, dtype=grad.dtype)
        xp.put_along_axis(result, self.index, grad, axis=self.dim)
        return result


class CumulativeSum(Function):
    """Running sums along ``dim``."""

    def forward(self, a: Array, dim: int) -> Any:
        self.dim = dim
        return a.cumsum(axis=dim)

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        return xp.flip(xp.flip(grad, self.dim).cumsum(axis=self.dim), self.dim)

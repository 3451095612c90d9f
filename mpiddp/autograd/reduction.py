"""Reductions over axes; ``dim`` is None (all axes), an axis or several."""


# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

from mpiddp.device import array_namespace
from mpiddp.device.half import is_half, sum_dtype, widened
from mpiddp.typing import Array, Shape

from .function import Function

Dim = int | tuple[int, ...] | list[int] | None


def _axes(dim: Dim) -> int | tuple[int, ...] | None:
    """Return ``dim`` as NumPy's; torch's empty list is all axes."""
    return tuple(dim) or None if isinstance(dim, tuple | list) else dim


def _kept(shape: Shape, dim: Dim) -> Shape:
    dim = _axes(dim)
    if dim is None:
        return (1,) * len(shape)
    axes = {d % len(shape) for d in (dim if isinstance(dim, tuple) else (dim,))} if shape else set()
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def reduced(shape: Shape, dim: Dim) -> int:
    return math.prod(n for n, kept in zip(shape, _kept(shape, dim), strict=True) if kept == 1)


def _rounded(result: Any, a: Array) -> Any:
    """Return a sum of half precision in the dtype of ``a``."""
    return result.astype(a.dtype) if is_half(a) else result


class Sum(Function):
    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        dim = _axes(dim)
        self.shape, self.kept = a.shape, _kept(a.shape, dim)
        return _rounded(a.sum(axis=dim, keepdims=keepdim, dtype=sum_dtype(a)), a)

    def backward(self, grad: Array) -> Array:
        return array_namespace(grad).broadcast_to(grad.reshape(self.kept), self.shape)


class Mean(Sum):
    """The mean of nothing is NaN."""

    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        dim = _axes(dim)
        self.shape, self.kept, self.count = a.shape, _kept(a.shape, dim), reduced(a.shape, dim)
        total = a.sum(axis=dim, keepdims=keepdim, dtype=sum_dtype(a))
        return _rounded(total / self.count if self.count else total + math.nan, a)

    def backward(self, grad: Array) -> Array:
        return super().backward(widened(grad) / max(self.count, 1))  # the count may overflow half precision


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
    """The elements at integers ``index``, one for each line along ``dim``; the axis is kept."""

    def forward(self, a: Array, index: Array, dim: int) -> Any:
        self.index, self.dim, self.shape = index, dim, a.shape
        return array_namespace(a).take_along_axis(a, index, axis=dim)

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        result = xp.zeros(self.shape, dtype=grad.dtype)
        xp.put_along_axis(result, self.index, grad, axis=self.dim)
        return result


class CumulativeSum(Function):
    def forward(self, a: Array, dim: int) -> Any:
        self.dim = dim
        return _rounded(a.cumsum(axis=dim, dtype=sum_dtype(a)), a).reshape(a.shape)

    def backward(self, grad: Array) -> Array:
        if not grad.ndim:
            return grad
        xp = array_namespace(grad)
        return xp.flip(xp.flip(grad, self.dim).cumsum(axis=self.dim), self.dim)


class LogSoftmax(Function):
    def forward(self, x: Array, dim: int) -> Array:
        xp = array_namespace(x)
        self.dim, dtype = dim, x.dtype
        x = widened(x)
        result = x - x.max(axis=dim, keepdims=True)
        self.exponentials = xp.exp(result)
        total = self.exponentials.sum(axis=dim, keepdims=True)
        result -= xp.log(total)
        self.exponentials /= total  # the softmax
        return result.astype(dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        return grad - self.exponentials * grad.sum(axis=self.dim, keepdims=True)


class Softmax(Function):
    def forward(self, x: Array, dim: int) -> Array:
        self.dim, dtype = dim, x.dtype
        x = widened(x)
        result = x - x.max(axis=dim, keepdims=True)
        array_namespace(x).exp(result, out=result)
        result /= result.sum(axis=dim, keepdims=True)
        self.result = result
        return result.astype(dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        weighted = grad * self.result
        weighted -= self.result * weighted.sum(axis=self.dim, keepdims=True)
        return weighted

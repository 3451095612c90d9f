"""Reductions over axes; ``dim`` is None (all axes), an axis or several."""
# mypy: disable-error-code="no-any-return"

import math
from typing import Any, Self

from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .function import Function, constant
from .shaping import Shaping

Dim = int | tuple[int, ...] | list[int] | None


def _axes(dim: Dim) -> int | tuple[int, ...] | None:
    """Return ``dim`` as NumPy's ``axis``. An empty list means all axes, as in torch."""
    return tuple(dim) or None if isinstance(dim, tuple | list) else dim


class Sum(Function):
    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        total = a.sum(axis=_axes(dim), keepdims=True)
        self.shape, self.kept = a.shape, total.shape
        return total if keepdim else total.squeeze(_axes(dim))

    def backward(self, grad: Array) -> Array:
        return array_namespace(grad).broadcast_to(grad.reshape(self.kept), self.shape)


class Mean(Sum):
    """The mean over axes. The mean of no elements is NaN."""

    def forward(self, a: Array, dim: Dim, keepdim: bool) -> Any:
        total = super().forward(a, dim, keepdim)
        self.count = a.size // max(total.size, 1)
        return total / self.count if self.count else total + math.nan

    def backward(self, grad: Array) -> Array:
        return super().backward(grad / max(self.count, 1))


class LogSoftmax(Function):
    def forward(self, x: Array, dim: int) -> Array:
        xp = array_namespace(x)
        self.dim = dim
        result = x - x.max(axis=dim, keepdims=True)
        self.exponentials = xp.exp(result)
        total = self.exponentials.sum(axis=dim, keepdims=True)
        result -= xp.log(total)
        self.exponentials /= total  # these are the softmax now
        return result

    def backward(self, grad: Array) -> Array:
        return grad - self.exponentials * grad.sum(axis=self.dim, keepdims=True)


class Softmax(Function):
    def forward(self, x: Array, dim: int) -> Array:
        self.dim = dim
        result = x - x.max(axis=dim, keepdims=True)
        array_namespace(x).exp(result, out=result)
        result /= result.sum(axis=dim, keepdims=True)
        self.result = result
        return result

    def backward(self, grad: Array) -> Array:
        weighted = grad * self.result
        weighted -= self.result * weighted.sum(axis=self.dim, keepdims=True)
        return weighted


class Reductions(Shaping):
    """A tensor's reductions over axes."""

    def sum(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the sum over axes, by default all."""
        return Sum.apply(self, dim, keepdim)

    def mean(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the mean over axes, by default all."""
        return Mean.apply(self, dim, keepdim)

    def var(self, dim: Dim = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1) -> Self:
        """Return the variance over axes, by default all.

        Its divisor is the number of elements less ``correction``, or the number itself if not ``unbiased``.
        """
        correction = correction if unbiased else 0
        squares = (self - self.mean(dim, keepdim=True)) ** 2
        mean = squares.mean(dim, keepdim)
        count = self.data.size // max(mean.data.size, 1)
        return mean * (count / (count - correction) if count > correction else math.inf)

    def softmax(self, dim: int) -> Self:
        """Return exponentials scaled to sum to 1 along ``dim``."""
        return Softmax.apply(self, dim)

    def log_softmax(self, dim: int) -> Self:
        """Return the logarithm of :meth:`softmax`, without overflow."""
        return LogSoftmax.apply(self, dim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the largest value along an axis, by default among all elements."""
        return constant(array_namespace(self.data).argmax(self.data, axis=dim, keepdims=keepdim))

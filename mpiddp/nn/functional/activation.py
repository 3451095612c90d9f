"""Activations and softmax. Imports ``autograd``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.arithmetic import Sigmoid, Tanh
from mpiddp.autograd.half import widened
from mpiddp.device import array_namespace
from mpiddp.typing import Array


class ReLU(Function):
    """``max(x, 0)``; the gradient at 0 is 0."""

    def forward(self, x: Array) -> Any:
        self.result = array_namespace(x).maximum(x, 0)
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad * (self.result > 0)


class LeakyReLU(Function):
    """``x`` where it is positive, ``slope * x`` elsewhere; the gradient at 0 is ``slope``."""

    def forward(self, x: Array, slope: float) -> Any:
        self.factor = array_namespace(x).where(x > 0, x.dtype.type(1), x.dtype.type(slope))
        return x * self.factor

    def backward(self, grad: Array) -> Any:
        return grad * self.factor


class LogSigmoid(Function):
    """``-log(1 + exp(-x))``, computed so that it cannot overflow."""

    def forward(self, x: Array) -> Any:
        xp = array_namespace(x)
        self.x = x
        return xp.minimum(x, 0) - xp.log1p(xp.exp(-abs(x)))

    def backward(self, grad: Array) -> Any:
        return grad * (0.5 - 0.5 * array_namespace(grad).tanh(0.5 * self.x))


class LogSoftmax(Function):
    """``x - log(sum(exp(x)))`` along an axis."""

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
    """``exp(x) / sum(exp(x))`` along an axis."""

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


def relu(input: Any) -> Tensor:
    """Return ``max(input, 0)``."""
    return ReLU.apply(input)


def leaky_relu(input: Any, negative_slope: float = 0.01) -> Tensor:
    """Return ``input`` where it is positive, and ``negative_slope * input`` elsewhere."""
    return LeakyReLU.apply(input, negative_slope)


def tanh(input: Any) -> Tensor:
    """Return the hyperbolic tangent."""
    return Tanh.apply(input)


def sigmoid(input: Any) -> Tensor:
    """Return ``1 / (1 + exp(-input))``."""
    return Sigmoid.apply(input)


def logsigmoid(input: Any) -> Tensor:
    """Return the logarithm of :func:`sigmoid`, computed so that it cannot overflow."""
    return LogSigmoid.apply(input)


def silu(input: Any) -> Tensor:
    """Return ``input * sigmoid(input)``.

    References
    ----------
    S. Elfwing et al., Sigmoid-weighted linear units, Neural Networks 107, 2018.
    """
    return Sigmoid.apply(input) * input


def _axis(dim: int | None, ndim: int) -> int:
    """Return torch's choice of the axis where the caller makes none."""
    if dim is not None:
        return dim
    return 0 if ndim in (0, 1, 3) else 1


def softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return ``exp(input)`` scaled so that it sums to 1 along ``dim``.

    Parameters
    ----------
    input : array or Tensor
        Floats of any shape.
    dim : int, optional
        The axis; by default 1, or 0 of inputs with 1 or 3 axes, as in torch.

    Notes
    -----
    The maximum is subtracted first, so it cannot overflow. Half precision is computed in float32.
    """
    return Softmax.apply(input, _axis(dim, input.ndim))


def log_softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return the logarithm of :func:`softmax`, which takes the same parameters, computed so that it cannot overflow."""
    return LogSoftmax.apply(input, _axis(dim, input.ndim))

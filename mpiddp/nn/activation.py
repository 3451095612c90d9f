"""Activations and softmax, functions and layers."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.arithmetic import ReLU as ReLUFunction
from mpiddp.autograd.arithmetic import Sigmoid as SigmoidFunction
from mpiddp.autograd.arithmetic import Tanh as TanhFunction
from mpiddp.autograd.reduction import LogSoftmax as LogSoftmaxFunction
from mpiddp.autograd.reduction import Softmax as SoftmaxFunction
from mpiddp.device import array_namespace
from mpiddp.device.half import widened
from mpiddp.typing import Array

from .module import Module


def relu(input: Any, inplace: bool = False) -> Tensor:
    """Return ``max(input, 0)``."""
    return ReLUFunction.apply(input)


def tanh(input: Any) -> Tensor:
    """Return the hyperbolic tangent."""
    return TanhFunction.apply(input)


def sigmoid(input: Any) -> Tensor:
    """Return ``1 / (1 + exp(-input))``."""
    return SigmoidFunction.apply(input)


def _axis(dim: int | None, ndim: int) -> int:
    """Return ``dim``, or torch's default: axis 0 of 0, 1 or 3 axes, else axis 1."""
    if dim is not None:
        return dim
    return 0 if ndim in (0, 1, 3) else 1


def softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return ``exp(input)`` scaled to sum to 1 along ``dim``, without overflow; by default torch's axis."""
    return SoftmaxFunction.apply(input, _axis(dim, input.ndim))


def log_softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return the logarithm of :func:`softmax`, without overflow."""
    return LogSoftmaxFunction.apply(input, _axis(dim, input.ndim))


_LIMIT = 6.0  # erf(6) is 1 in float64


@functools.cache
def _erfc_coefficients(degree: int) -> tuple[float, ...]:
    """Return P's coefficients in erfc(z) = t exp(P(u) - z z), t = 2 / (2 + z), u in [-1, 1] for z in [0, 6].

    8 Chebyshev terms are exact to float32, 24 to float64.
    """
    lowest = 2 / (2 + _LIMIT)
    nodes = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    t = lowest + (nodes + 1) * (1 - lowest) / 2
    z = 2 / t - 2
    values = [math.log(math.erfc(zi) / ti) + zi * zi for zi, ti in zip(z, t, strict=True)]
    series = np.polynomial.chebyshev.chebfit(nodes, values, degree)
    return tuple(float(c) for c in np.polynomial.chebyshev.cheb2poly(series))


def erf(x: Array) -> Array:
    """Return the error function to the accuracy of the dtype (W. H. Press et al., Numerical Recipes, section 6.2)."""
    xp = array_namespace(x)
    z = xp.minimum(xp.abs(x), _LIMIT)
    t = 2 / (2 + z)
    lowest = 2 / (2 + _LIMIT)
    u = (t - lowest) * (2 / (1 - lowest)) - 1
    coefficients = _erfc_coefficients(24 if x.dtype == np.float64 else 10)
    p = xp.full_like(u, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        p *= u
        p += coefficient
    p -= z * z
    return xp.copysign(1 - t * xp.exp(p), x)


class GELUFunction(Function):
    def forward(self, x: Array) -> Any:
        dtype = x.dtype
        self.x = x = widened(x)
        self.below = 0.5 * (1 + erf(x * (1 / math.sqrt(2))))
        return (x * self.below).astype(dtype, copy=False)

    def backward(self, grad: Array) -> Any:
        x = self.x
        density = array_namespace(x).exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return grad * (self.below + x * density)


def gelu(input: Any) -> Tensor:
    """Return the Gaussian error linear unit (D. Hendrycks and K. Gimpel, arXiv:1606.08415)."""
    return GELUFunction.apply(input)


class ReLU(Module):
    """``max(x, 0)``."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: Any) -> Tensor:
        return relu(input)


class GELU(Module):
    """Layer of :func:`mpiddp.nn.functional.gelu`."""

    def forward(self, input: Any) -> Tensor:
        return gelu(input)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, input: Any) -> Tensor:
        return tanh(input)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def forward(self, input: Any) -> Tensor:
        return sigmoid(input)


class _AlongAxis(Module):
    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Softmax(_AlongAxis):
    """Layer of :func:`mpiddp.nn.functional.softmax`."""

    def forward(self, input: Any) -> Tensor:
        return softmax(input, self.dim)


class LogSoftmax(_AlongAxis):
    """Layer of :func:`mpiddp.nn.functional.log_softmax`."""

    def forward(self, input: Any) -> Tensor:
        return log_softmax(input, self.dim)

"""The Gaussian error linear unit, and the error function that NumPy has not. Imports ``autograd``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.half import widened
from mpiddp.device import array_namespace
from mpiddp.typing import Array

_LIMIT = 6.0  # erf(6) is 1 in float64


@functools.cache
def _erfc_coefficients(degree: int) -> tuple[float, ...]:
    """Return P's coefficients in erfc(z) = t exp(P(u) - z z) with t = 2 / (2 + z) and u in [-1, 1] for z in [0, 6].

    P is smooth, so few Chebyshev terms have full accuracy: 8 for float32, 24 for float64.
    """
    lowest = 2 / (2 + _LIMIT)
    nodes = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    t = lowest + (nodes + 1) * (1 - lowest) / 2
    z = 2 / t - 2
    values = [math.log(math.erfc(zi) / ti) + zi * zi for zi, ti in zip(z, t, strict=True)]
    series = np.polynomial.chebyshev.chebfit(nodes, values, degree)
    return tuple(float(c) for c in np.polynomial.chebyshev.cheb2poly(series))


def erf(x: Array) -> Array:
    """Return the error function of an array, to the accuracy of its dtype.

    References
    ----------
    W. H. Press et al., Numerical Recipes, section 6.2: the form of the approximation; its coefficients are fitted here.
    """
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


class GELU(Function):
    """``x`` times the probability that a normal variable is below ``x``."""

    def forward(self, x: Array) -> Any:
        dtype = x.dtype
        self.x = x = widened(x)
        self.below = 0.5 * (1 + erf(x * (1 / math.sqrt(2))))
        return (x * self.below).astype(dtype, copy=False)

    def backward(self, grad: Array) -> Any:
        x = self.x
        density = array_namespace(x).exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return grad * (self.below + x * density)


class TanhGELU(Function):
    """The approximation ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``."""

    def forward(self, x: Array) -> Any:
        dtype = x.dtype
        self.x = x = widened(x)
        self.tanh = array_namespace(x).tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        return (0.5 * x * (1 + self.tanh)).astype(dtype, copy=False)

    def backward(self, grad: Array) -> Any:
        x, tanh = self.x, self.tanh
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)


def gelu(input: Any, approximate: str = "none") -> Tensor:
    """Return the Gaussian error linear unit.

    Parameters
    ----------
    input : array or Tensor
        Any shape.
    approximate : {'none', 'tanh'}
        Exact, or GPT-2's approximation.

    References
    ----------
    D. Hendrycks and K. Gimpel, Gaussian error linear units, arXiv:1606.08415.
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return GELU.apply(input) if approximate == "none" else TanhGELU.apply(input)

"""Activation layers. Imports ``functional`` and ``module``."""

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Tensor

from . import functional as F  # noqa: N812 (its customary name)
from .module import Module


class ReLU(Module):
    """``max(x, 0)``."""

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.relu(input)


class LeakyReLU(Module):
    """``x`` where it is positive, ``negative_slope * x`` elsewhere.

    Parameters
    ----------
    negative_slope : float, default 0.01
        See there.
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.leaky_relu(input, self.negative_slope)

    def extra_repr(self) -> str:
        """Return the slope."""
        return f"negative_slope={self.negative_slope}"


class SiLU(Module):
    """``x * sigmoid(x)``."""

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.silu(input)


class GELU(Module):
    """The Gaussian error linear unit (:func:`mpiddp.nn.functional.gelu`).

    Parameters
    ----------
    approximate : {'none', 'tanh'}
        Exact, or by a hyperbolic tangent.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.gelu(input, self.approximate)

    def extra_repr(self) -> str:
        """Return the mode."""
        return f"approximate={self.approximate!r}"


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.tanh(input)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def forward(self, input: Any) -> Tensor:
        """Return the activation."""
        return F.sigmoid(input)


class _AlongAxis(Module):
    """What the softmax layers share: an axis."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        """Return the axis."""
        return f"dim={self.dim}"


class Softmax(_AlongAxis):
    """``exp(x)`` scaled so that it sums to 1 along ``dim``.

    Parameters
    ----------
    dim : int, optional
        The axis; by default 1, or 0 of inputs with 1 or 3 axes, as in torch.
    """

    def forward(self, input: Any) -> Tensor:
        """Return the probabilities."""
        return F.softmax(input, self.dim)


class LogSoftmax(_AlongAxis):
    """The logarithm of the softmax along ``dim``.

    Parameters
    ----------
    dim : int, optional
        As `Softmax` takes it.
    """

    def forward(self, input: Any) -> Tensor:
        """Return the log-probabilities."""
        return F.log_softmax(input, self.dim)

"""Activations and softmax, as functions and as layers."""

# mypy: disable-error-code="no-any-return"

from typing import Any

from mpiddp.autograd import Tensor
from mpiddp.autograd.arithmetic import ReLU as ReLUFunction, Sigmoid as SigmoidFunction, Tanh as TanhFunction
from mpiddp.autograd.reduction import LogSoftmax as LogSoftmaxFunction, Softmax as SoftmaxFunction

from .module import Layer, Module


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
    """Return ``dim``. If it is None, return torch's default: axis 0 for 0, 1 or 3 axes, else axis 1."""
    if dim is not None:
        return dim
    return 0 if ndim in (0, 1, 3) else 1


def softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return ``exp(input)`` scaled to sum to 1 along ``dim``, without overflow.

    Without ``dim`` the axis is torch's default: 0 for 0, 1 or 3 axes, else 1.
    """
    return SoftmaxFunction.apply(input, _axis(dim, input.ndim))


def log_softmax(input: Any, dim: int | None = None) -> Tensor:
    """Return the logarithm of :func:`softmax`, without overflow."""
    return LogSoftmaxFunction.apply(input, _axis(dim, input.ndim))


class ReLU(Module):
    """``max(x, 0)``."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: Any) -> Tensor:
        return relu(input)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, input: Any) -> Tensor:
        return tanh(input)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def forward(self, input: Any) -> Tensor:
        return sigmoid(input)


class _AlongAxis(Layer):
    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim


class Softmax(_AlongAxis):
    """Layer of :func:`mpiddp.nn.functional.softmax`."""

    def forward(self, input: Any) -> Tensor:
        return softmax(input, self.dim)


class LogSoftmax(_AlongAxis):
    """Layer of :func:`mpiddp.nn.functional.log_softmax`."""

    def forward(self, input: Any) -> Tensor:
        return log_softmax(input, self.dim)

"""Losses, as functions and as layers, for arguments of the same shapes as in torch."""

# mypy: disable-error-code="no-any-return"

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.function import values_of
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array

from .activation import log_softmax
from .module import Module


def _check(input: Any, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction; expected 'mean', 'sum' or 'none'")
    if input.dtype.kind in "fV" and input.dtype.itemsize == 2:  # the number of samples alone may overflow float16
        raise TypeError(f"losses are computed in float32 or float64, got {input.dtype}: convert x.astype('float32')")


class NLLLossFunction(Function):
    """Minus the log-probabilities x (N, C, ...) of the classes ``target`` (N, ...), reduced."""

    def forward(self, x: Array, target: Array, reduction: str) -> Any:
        xp = array_namespace(x)
        self.shape = x.shape
        wrong = (target < 0) | (target >= x.shape[1])
        self.factors: Any = -1  # factors of the log-probabilities: one number, or an array (N, ...)
        if is_device_array(target):
            target = xp.where(wrong, 0, target)
            self.factors = xp.where(wrong, x.dtype.type(math.nan), x.dtype.type(-1))
        elif wrong.any():
            raise IndexError(f"Target {target[wrong][0]} is out of bounds.")
        n, *others = xp.ix_(*map(xp.arange, target.shape))
        self.index = n, target, *others
        losses = x[self.index] * self.factors
        if reduction != "mean":
            return losses if reduction == "none" else losses.sum()
        count = x.dtype.type(target.size)
        with np.errstate(divide="ignore", invalid="ignore"):  # the mean of no sample is NaN, as in torch
            self.factors = self.factors / count
            return losses.sum() / count

    def backward(self, grad: Array) -> Array:
        result: Array = array_namespace(grad).zeros(self.shape, dtype=grad.dtype)
        result[self.index] = grad * self.factors
        return result


def nll_loss(input: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the negative log-likelihood of classes.

    Parameters
    ----------
    input : array or Tensor
        Log-probabilities (N, C) or (N, C, ...).
    target : array or Tensor
        Integer classes (N) or (N, ...). A class below 0, or C or more, raises IndexError. On a GPU a check would have
        to wait for the device, so such a class gives a loss of NaN instead.
    """
    _check(input, reduction)
    labels = array_namespace(values_of(input)).asarray(values_of(target))
    if labels.dtype.kind not in "iu":
        raise TypeError(f"expected integer classes as target, not probabilities: got {labels.dtype} {labels.shape}")
    if input.ndim < 2 or labels.shape != (input.shape[0], *input.shape[2:]):
        raise ValueError(
            f"Expected input batch_size ({input.shape[0] if input.ndim else 0}) to match target batch_size "
            f"({labels.shape[0] if labels.ndim else 0}): input has shape {input.shape}, target {labels.shape}"
        )
    return NLLLossFunction.apply(input, labels, reduction)


def cross_entropy(input: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of classes with the softmax of scores (N, C) or (N, C, ...).

    The result is :func:`nll_loss` of the scores' :func:`log_softmax`. :func:`nll_loss` describes the arguments.
    """
    return nll_loss(log_softmax(input, 1), target, reduction=reduction)


def mse_loss(input: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return squared differences, reduced; different shapes broadcast, with a warning."""
    _check(input, reduction)
    difference: Tensor = (input if isinstance(input, Tensor) else Tensor(input)) - target
    shapes = tuple(input.shape), tuple(getattr(target, "shape", ()))
    if shapes[0] != shapes[1]:  # shapes (N, 1) and (N) would broadcast to (N, N)
        warnings.warn(
            f"Using a target size ({shapes[1]}) that is different to the input size ({shapes[0]}). This will likely"
            " lead to incorrect results due to broadcasting. Please ensure they have the same size.",
            stacklevel=2,
        )
    losses = difference * difference
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


class _Loss(Module):
    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, *, reduction: str = "mean") -> None:
        self.reduction = reduction

    def forward(self, input: Any, target: Any) -> Tensor:
        return type(self).function(input, target, reduction=self.reduction)


class NLLLoss(_Loss):
    """Layer of :func:`mpiddp.nn.functional.nll_loss`."""

    function = nll_loss


class CrossEntropyLoss(_Loss):
    """Layer of :func:`mpiddp.nn.functional.cross_entropy`."""

    function = cross_entropy


class MSELoss(_Loss):
    """Layer of :func:`mpiddp.nn.functional.mse_loss`."""

    function = mse_loss

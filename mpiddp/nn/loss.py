"""Losses, functions and layers; shapes and errors are torch's."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.half import is_half
from mpiddp.typing import Array

from .activation import log_softmax, logsigmoid
from .module import Module


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction; expected 'mean', 'sum' or 'none'")


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _plain(operand: Any) -> Any:
    return operand.data if isinstance(operand, Tensor) else operand


def _like(operand: Any, input: Any) -> Any:
    """Return weights in the scores' dtype, lest NumPy's float64 spread to the loss."""
    return None if operand is None else array_namespace(_plain(input)).asarray(_plain(operand), dtype=input.dtype)


def _in_single(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a loss of half precision be computed in float32 and rounded once.

    float16 overflows in sums and class numbers.
    """

    @functools.wraps(loss)
    def computed(input: Any, target: Any, *others: Any, **options: Any) -> Tensor:
        if not is_half(_plain(input)):
            return loss(input, target, *others, **options)
        tensor = input if isinstance(input, Tensor) else Tensor(input)
        return loss(tensor.to(np.float32), target, *others, **options).to(input.dtype)

    return computed


class NLLLossFunction(Function):
    def forward(self, x: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str) -> Any:
        xp = array_namespace(x)
        self.shape = x.shape  # (N, C, ...)
        classes = x.shape[1]
        ignored = target == ignore_index
        safe = target
        wrong: Array | None = None
        self.factors: Any = -1  # of the log-probabilities; (N, ...) or one number
        count: Any = target.size
        # Reading a device would wait for it.
        on_device = is_device_array(target)
        if on_device or ignored.any():
            safe = xp.where(ignored, 0, target)
            count = count - ignored.sum()
        if on_device:
            wrong = (safe < 0) | (safe >= classes)
            safe = xp.where(wrong, 0, safe)
        elif safe.size and (safe.min() < 0 or safe.max() >= classes):
            first = safe[(safe < 0) | (safe >= classes)].ravel()[0]
            raise IndexError(f"Target {first} is out of bounds.")
        if weight is not None:
            self.factors = -xp.where(ignored, 0, weight[safe])
            count = -self.factors.sum()
        elif safe is not target:
            self.factors = xp.where(ignored, x.dtype.type(0), x.dtype.type(-1))
        if wrong is not None:
            self.factors = xp.where(wrong, x.dtype.type(math.nan), self.factors)
        n, *others = xp.ix_(*map(xp.arange, safe.shape))
        self.index = n, safe, *others
        losses = x[self.index] * self.factors
        if reduction == "none":
            return losses
        if reduction == "mean":
            count = xp.asarray(count, dtype=x.dtype)
            # The mean of no sample is NaN, as torch's, without a warning.
            with np.errstate(divide="ignore", invalid="ignore"):
                self.factors = self.factors / count
                if safe is not target:  # of no sample, 0 / 0
                    self.factors = xp.where(ignored, x.dtype.type(0), self.factors)
                return losses.sum() / count
        return losses.sum()

    def backward(self, grad: Array) -> Array:
        result: Array = array_namespace(grad).zeros(self.shape, dtype=grad.dtype)
        result[self.index] = grad * self.factors
        return result


@_in_single
def nll_loss(
    input: Any, target: Any, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Return the negative log-likelihood of classes for log-probabilities (N, C), (N, C, ...) or (C).

    Parameters
    ----------
    target : array or Tensor
        Integer classes (N), (N, ...) or (). Others raise IndexError; on a GPU, where checking would wait, they give
        NaN.
    weight : array, optional
        Factor of each class, (C); 'mean' divides by the sum of the targets' factors.
    ignore_index : int
        Targets of this value do not count.
    """
    _check_reduction(reduction)
    labels = array_namespace(_plain(input)).asarray(_plain(target))
    if input.ndim == 1:
        loss = nll_loss(
            input.reshape((1, *input.shape)), labels.reshape(1), weight, ignore_index=ignore_index, reduction=reduction
        )
        return loss.reshape(()) if isinstance(loss, Tensor) else loss
    if input.ndim < 1 or labels.shape != (input.shape[0], *input.shape[2:]):
        raise ValueError(
            f"Expected input batch_size ({input.shape[0] if input.ndim else 0}) to match target batch_size "
            f"({labels.shape[0] if labels.ndim else 0}): input has shape {input.shape}, target {labels.shape}"
        )
    if labels.dtype.kind not in "iu":
        raise TypeError(f"expected integer classes as target, got {labels.dtype}")
    return NLLLossFunction.apply(input, labels, _like(weight, input), ignore_index, reduction)


@_in_single
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of classes with the softmax of scores (N, C), (N, C, ...) or (C).

    ``target`` has integer classes, or probabilities of the shape of ``input``; the share ``label_smoothing`` of it is
    spread over all classes. The rest is as of :func:`nll_loss`.
    """
    _check_reduction(reduction)
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    axis = 0 if input.ndim == 1 else 1
    scores = log_softmax(input, axis)
    wanted = _plain(target)
    kind = getattr(getattr(wanted, "dtype", None), "kind", "i")
    factors = _like(weight, input)
    if factors is not None:
        factors = factors.reshape(-1, *(1,) * (input.ndim - axis - 1))  # along the class axis
    if kind == "f":
        if wanted.shape != input.shape:
            raise ValueError(
                f"expected integer classes, or probabilities of shape {input.shape}, as target; got {wanted.dtype}"
                f" {wanted.shape}"
            )
        spread = _like(wanted, input) * (1 - label_smoothing) + label_smoothing / input.shape[axis]
        losses = -(scores * (spread if factors is None else spread * factors)).sum(axis)
        return _reduced(losses, reduction)
    loss = nll_loss(scores, wanted, weight, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing == 0:
        return loss
    labels = array_namespace(scores.data).asarray(wanted)
    ignored = labels == ignore_index
    counted = (~ignored).astype(scores.dtype)
    smooth = -(scores if factors is None else scores * factors).sum(axis).masked_fill(ignored, 0)
    if reduction == "sum":
        smooth = smooth.sum()
    elif reduction == "mean":
        per_label = counted
        if factors is not None:
            per_label = counted * factors.ravel()[array_namespace(labels).where(counted > 0, labels, 0)]
        smooth = smooth.sum() / per_label.sum()
    return loss * (1 - label_smoothing) + smooth * (label_smoothing / input.shape[axis])


def _difference(input: Any, target: Any) -> Tensor:
    """Return ``input - target``; warn where shapes differ: (N, 1) - (N) is (N, N)."""
    difference: Tensor = (input if isinstance(input, Tensor) else Tensor(input)) - target
    shapes = tuple(input.shape), tuple(getattr(target, "shape", ()))
    if shapes[0] != shapes[1]:
        warnings.warn(
            f"Using a target size ({shapes[1]}) that is different to the input size ({shapes[0]}). This will likely"
            " lead to incorrect results due to broadcasting. Please ensure they have the same size.",
            stacklevel=4,
        )
    return difference


@_in_single
def mse_loss(input: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return squared differences, reduced; different shapes broadcast, with a warning."""
    _check_reduction(reduction)
    difference = _difference(input, target)
    return _reduced(difference * difference, reduction)


@_in_single
def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, *, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """Return the cross entropy of two classes; ``sigmoid(input)`` is the probability of the second.

    ``target`` holds floats from 0 to 1; ``weight`` and ``pos_weight``, factors of elements and of targets of 1,
    broadcast.
    """
    _check_reduction(reduction)
    if target.shape != input.shape:
        raise ValueError(f"Target size ({target.shape}) must be the same as input size ({input.shape})")
    logarithm = logsigmoid(input)  # of the second class's probability; that of the first is smaller by input
    positive = target if pos_weight is None else _like(pos_weight, input) * target
    losses = (1 - target) * (input - logarithm) - positive * logarithm
    return _reduced(losses if weight is None else losses * _like(weight, input), reduction)


class NLLLoss(Module):
    """Layer of :func:`mpiddp.nn.functional.nll_loss`; ``weight`` is a buffer."""

    def __init__(self, weight: Array | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.register_buffer("weight", weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        return nll_loss(input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class CrossEntropyLoss(NLLLoss):
    """Layer of :func:`mpiddp.nn.functional.cross_entropy`; ``weight`` is a buffer."""

    def __init__(
        self,
        weight: Array | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction)
        self.label_smoothing = label_smoothing

    def forward(self, input: Any, target: Any) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class _OfValues(Module):
    def __init__(self, *, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction


class MSELoss(_OfValues):
    """Layer of :func:`mpiddp.nn.functional.mse_loss`."""

    def forward(self, input: Any, target: Any) -> Tensor:
        return mse_loss(input, target, reduction=self.reduction)


class BCEWithLogitsLoss(_OfValues):
    """Layer of :func:`mpiddp.nn.functional.binary_cross_entropy_with_logits`; both weights are buffers."""

    def __init__(
        self, weight: Array | None = None, *, reduction: str = "mean", pos_weight: Array | None = None
    ) -> None:
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        return binary_cross_entropy_with_logits(
            input, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )

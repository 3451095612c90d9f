"""Batch normalization, as functions of the tape and as layers."""

# mypy: disable-error-code="no-any-return"

import math
from abc import abstractmethod
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.function import unbroadcast
from mpiddp.device import array_namespace
from mpiddp.typing import Array, DTypeLike

from .linear import check_dtypes
from .module import Layer
from .parameter import Parameter


class Normalization(Function):
    """Base of functions that return ``normal * weight + bias``.

    A subclass computes ``normal`` in its forward, and defines `gradient_of_input`.
    """

    normal: Array
    weight: Array

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (
            self.gradient_of_input(grad) if self.needs(0) else None,
            unbroadcast(grad * self.normal, self.weight.shape) if self.needs(1) else None,
            unbroadcast(grad, self.weight.shape) if self.needs(2) else None,
        )

    @abstractmethod
    def gradient_of_input(self, grad: Array) -> Array: ...


class NormalizeFunction(Normalization):
    """Normalize ``x`` by its mean and variance over ``axes``.

    Mean and variance are appended to ``statistics``, with length 1 along ``axes``. ``weight`` and ``bias`` broadcast to
    ``x``.
    """

    def forward(
        self, x: Array, weight: Array, bias: Array, axes: tuple[int, ...], eps: float, statistics: list[Array]
    ) -> Array:
        xp = array_namespace(x)
        self.axes, self.weight = axes, weight
        mean = x.mean(axis=axes, keepdims=True)
        centred = x - mean
        variance = xp.mean(centred * centred, axis=axes, keepdims=True)
        self.inverse = 1 / xp.sqrt(variance + x.dtype.type(eps))
        centred *= self.inverse
        self.normal = centred
        statistics += [mean, variance]
        return affine(centred, weight, bias)

    def gradient_of_input(self, grad: Array) -> Array:
        xp, normal = array_namespace(grad), self.normal
        inner = grad * self.weight
        for_x = inner - inner.mean(axis=self.axes, keepdims=True)
        for_x -= normal * xp.mean(inner * normal, axis=self.axes, keepdims=True)
        for_x *= self.inverse
        return for_x


def affine(normal: Array, weight: Array, bias: Array) -> Array:
    """Return ``normal * weight + bias``, in a new array."""
    result = normal * weight
    result += bias
    return result


def along_channels(value: Any, ndim: int) -> Any:
    """Reshape (C) to broadcast to (N, C, ...)."""
    return value.reshape((1, value.shape[0], *(1,) * (ndim - 2)))


def blend(running: Array, new: Array, momentum: float) -> None:
    running *= 1 - momentum
    running += new * momentum


class BatchNorm(Layer):
    """Base of the batch normalizations (S. Ioffe and C. Szegedy, arXiv:1502.03167).

    Training normalizes by the mean and variance of the batch, which must have more than one value for each channel. It
    also moves the running mean and variance towards those of the batch (the variance unbiased) by the share
    ``momentum``. Evaluation normalizes by the running mean and variance. A subclass names the numbers of axes that its
    input may have in ``ndims``, and may override ``normalize``.
    """

    ndims: tuple[int, ...] = ()
    running_mean: Array
    running_var: Array
    num_batches_tracked: Array

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *, dtype: DTypeLike = np.float32
    ) -> None:
        if momentum is None:
            raise TypeError("momentum should be a float, got None: a mean over all batches is not there")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight, self.bias = Parameter(np.ones(num_features, dtype)), Parameter(np.zeros(num_features, dtype))
        self.register_buffer("running_mean", np.zeros(num_features, dtype))
        self.register_buffer("running_var", np.ones(num_features, dtype))
        self.register_buffer("num_batches_tracked", np.zeros((), np.int64))

    def forward(self, input: Any) -> Tensor:
        if self.ndims and input.ndim not in self.ndims:
            wanted = " or ".join(f"{n}D" for n in self.ndims)
            raise ValueError(f"expected {wanted} input (got {input.ndim}D input)")
        if input.shape[1] != self.num_features:
            raise RuntimeError(f"running_mean should contain {input.shape[1]} elements not {self.num_features}")
        if self.training:
            self.num_batches_tracked += 1
        return self.normalize(input)

    def normalize(self, input: Any) -> Tensor:
        """Normalize by the batch's statistics in training, and by the running statistics in evaluation."""
        check_dtypes("batch_norm", input, self.weight, self.bias)
        scale, shift = along_channels(self.weight, input.ndim), along_channels(self.bias, input.ndim)
        if not self.training:
            mean, variance = (along_channels(x, input.ndim) for x in (self.running_mean, self.running_var))
            inverse = 1 / array_namespace(mean).sqrt(variance + variance.dtype.type(self.eps))
            output = (input if isinstance(input, Tensor) else Tensor(input)) - mean
            output *= inverse
            output *= scale
            output += shift
            return output
        axes = (0, *range(2, input.ndim))
        count = math.prod(input.shape[axis] for axis in axes)
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(input.shape)}"
            )
        statistics: list[Array] = []
        output = NormalizeFunction.apply(input, scale, shift, axes, self.eps, statistics)
        blend(self.running_mean, statistics[0].reshape(-1), self.momentum)
        blend(self.running_var, statistics[1].reshape(-1) * (count / (count - 1)), self.momentum)
        return output


class BatchNorm1d(BatchNorm):
    """Batch normalization of (N, C) or (N, C, L)."""

    ndims = (2, 3)


class BatchNorm2d(BatchNorm):
    """Batch normalization of images (N, C, H, W)."""

    ndims = (4,)

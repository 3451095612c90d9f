"""Pooling over windows of images. Imports ``autograd`` and ``window``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .window import Pair, Window, pair


class MaxPool2d(Function):
    """The largest value in each window; of equal ones the first gets the gradient, as torch's."""

    def forward(self, x: Array, window: Window) -> Array:
        xp = array_namespace(x)
        self.window = window
        self.image = window.pad(x, -float("inf"))
        views = [self.image[seen] for _, _, seen in window.offsets()]
        result = views[0].copy(order="K") if len(views) == 1 else xp.maximum(views[0], views[1])
        for view in views[2:]:
            xp.maximum(result, view, out=result)
        self.result = result
        return result  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        window, image, result = self.window, self.image, self.result
        total = xp.zeros_like(image, dtype=grad.dtype)
        free = xp.ones_like(result, dtype=bool)
        for _, _, seen in window.offsets():
            here = image[seen] == result
            here &= free
            free ^= here
            if window.overlaps:
                total[seen] += grad * here
            else:
                xp.multiply(grad, here, out=total[seen])
        return window.crop(total)


class AvgPool2d(Function):
    """The mean of each window, zeros of the margin included."""

    def forward(self, x: Array, window: Window) -> Array:
        self.window = window
        image = window.pad(x)
        views = [image[seen] for _, _, seen in window.offsets()]
        result = views[0].copy(order="K")
        for view in views[1:]:
            result += view
        result *= result.dtype.type(1 / len(views))
        self.like = image
        return result

    def backward(self, grad: Array) -> Array:
        window = self.window
        total = array_namespace(grad).zeros_like(self.like, dtype=grad.dtype)
        share = grad * grad.dtype.type(1 / (window.kernel[0] * window.kernel[1]))
        for _, _, seen in window.offsets():
            total[seen] += share
        return window.crop(total)


class AdaptiveAvgPool2d(Function):
    """Means over a given number of windows that cover the image and may share a row or column."""

    def forward(self, x: Array, output: tuple[int, int]) -> Array:
        xp = array_namespace(x)
        self.shape = x.shape
        self.bins = [
            [slice(i * length // n, -(-(i + 1) * length // n)) for i in range(n)]
            for length, n in zip(x.shape[-2:], output, strict=True)
        ]
        result = xp.empty((*x.shape[:-2], *output), dtype=x.dtype)
        for i, rows in enumerate(self.bins[0]):
            for j, columns in enumerate(self.bins[1]):
                result[..., i, j] = x[..., rows, columns].mean(axis=(-2, -1))
        return result  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> Array:
        total: Array = array_namespace(grad).zeros(self.shape, dtype=grad.dtype)
        for i, rows in enumerate(self.bins[0]):
            for j, columns in enumerate(self.bins[1]):
                count = (rows.stop - rows.start) * (columns.stop - columns.start)
                total[..., rows, columns] += (grad[..., i, j] / count)[..., None, None]
        return total


def _window(input: Any, kernel_size: Pair, stride: Pair | None, padding: Pair) -> Window:
    """Return the window of a pooling operation, whose stride is its size by default."""
    kernel, margin = pair(kernel_size), pair(padding)
    if 2 * margin[0] > kernel[0] or 2 * margin[1] > kernel[1]:
        raise RuntimeError(
            f"pad should be at most half of effective kernel size, but got pad={max(margin)}, kernel_size={min(kernel)}"
        )
    step = kernel if stride is None else pair(stride)
    return Window(tuple(input.shape[-2:]), kernel, step, margin, (1, 1))


def max_pool2d(input: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the largest value of each window of images (..., H, W).

    Parameters
    ----------
    input : array or Tensor
        Shape (N, C, H, W) or (C, H, W), in any memory order, which the output has too.
    kernel_size : int or pair of int
        The window.
    stride : int or pair of int, optional
        Its step; by default its size.
    padding : int or pair of int, default 0
        Margin that never wins; at most half of the window.

    Returns
    -------
    Tensor
        Shape (..., H', W').
    """
    return MaxPool2d.apply(input, _window(input, kernel_size, stride, padding))


def avg_pool2d(input: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the mean of each window of images (..., H, W); parameters as :func:`max_pool2d`'s, zeros in the margin."""
    return AvgPool2d.apply(input, _window(input, kernel_size, stride, padding))


def adaptive_avg_pool2d(input: Any, output_size: int | tuple[int | None, int | None]) -> Tensor:
    """Return means of images (..., H, W) over ``output_size`` windows that cover them; None keeps a length."""
    wanted = (output_size, output_size) if isinstance(output_size, int) else output_size
    output = tuple(n if m is None else m for n, m in zip(input.shape[-2:], wanted, strict=True))
    return AdaptiveAvgPool2d.apply(input, output)

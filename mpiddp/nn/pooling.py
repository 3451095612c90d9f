"""Pooling over windows of images, as a function and as a layer."""

# mypy: disable-error-code="no-any-return"

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .module import Layer
from .window import Pair, Window, batch_first, batch_last, pair


class MaxPool2dFunction(Function):
    """The maximum of each window.

    For backward it keeps the positions of the maxima, not the image. Among equal maxima of a window the first gets the
    gradient, as in torch.
    """

    def forward(self, x: Array, window: Window) -> Array:
        xp = array_namespace(x)
        image = window.pad(batch_last(x), -math.inf)  # (C, H, W, N)
        views = [image[seen] for _, _, seen in window.offsets()]
        result = views[0].copy(order="K") if len(views) == 1 else xp.maximum(views[0], views[-1])
        for view in views[1:-1]:
            xp.maximum(result, view, out=result)
        if self.needs(0):
            self.window, self.padded = window, image.shape
            free = xp.ones_like(result, dtype=bool)  # windows without a winner yet
            self.winner = xp.zeros_like(result, dtype=np.min_scalar_type(len(views) - 1))
            for view in views[:-1]:  # a window without a winner in these has it in the last view
                free &= view != result
                self.winner += free
        return batch_first(result)

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        window, grad = self.window, batch_last(grad)
        image = (xp.empty if window.covers else xp.zeros)(self.padded, dtype=grad.dtype)
        for position, (_, _, seen) in enumerate(window.offsets()):
            here = self.winner == position
            if window.overlaps:
                image[seen] += grad * here
            else:
                xp.multiply(grad, here, out=image[seen])
        return batch_first(window.crop(image))


def max_pool2d(input: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the largest value of each window of images (N, C, H, W).

    ``kernel_size``, ``stride`` and ``padding`` are ints or pairs of int. ``stride`` is by default ``kernel_size``.
    ``padding`` is the width of a margin of minus infinity, at most half of the window.
    """
    kernel, margin = pair(kernel_size), pair(padding)
    if 2 * margin[0] > kernel[0] or 2 * margin[1] > kernel[1]:
        raise RuntimeError(
            f"pad should be at most half of effective kernel size, but got pad={max(margin)}, kernel_size={min(kernel)}"
        )
    if input.ndim != 4:
        raise RuntimeError(f"Expected images (N, C, H, W) as input of max_pool2d, but got size: {list(input.shape)}")
    window = Window(tuple(input.shape[-2:]), kernel, kernel if stride is None else pair(stride), margin)
    return MaxPool2dFunction.apply(input, window)


class MaxPool2d(Layer):
    """Layer of :func:`mpiddp.nn.functional.max_pool2d`."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size, self.padding = kernel_size, padding
        self.stride = kernel_size if stride is None else stride

    def forward(self, input: Any) -> Tensor:
        return max_pool2d(input, self.kernel_size, self.stride, self.padding)

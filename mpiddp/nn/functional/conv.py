"""Convolution as one matrix product. Imports ``autograd`` and ``window``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.half import product, total
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .window import Pair, Window, batch_first, batch_last, pair


class Conv2d(Function):
    """Correlation of images (N, C, H, W) with kernels (O, C / G, kh, kw) in G groups.

    Every pixel under every kernel position is copied into a matrix, by kernel position: as many strided copies as the
    kernel has pixels. The matrix is kept for backward; it is kh kw times as large as the output of one channel, for
    each input channel.
    """

    def forward(self, x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
        xp = array_namespace(x)
        self.window, self.weight = window, weight
        n, c, out = x.shape[0], x.shape[1], weight.shape[0]
        image = window.pad(batch_last(x))  # (C, H, W, N)
        if not image.flags.c_contiguous:
            image = xp.ascontiguousarray(image)
        columns = xp.empty((c, *window.kernel, *window.output, n), dtype=x.dtype)
        for i, j, seen in window.offsets():
            columns[:, i, j] = image[seen]
        self.matrix = groups, out // groups, weight[0].size  # (G, O / G, K)
        self.columns = columns.reshape(groups, weight[0].size, math.prod(window.output) * n)  # (G, K, P)
        y = product(weight.reshape(self.matrix), self.columns)  # (G, O / G, P)
        if bias is not None:
            y += bias.reshape(groups, -1, 1)
        return batch_first(y.reshape(out, *window.output, n))

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp = array_namespace(grad)
        window, columns, (groups, out, _) = self.window, self.columns, self.matrix
        weight = self.weight.reshape(self.matrix)
        flat = batch_last(grad).reshape(groups, out, columns.shape[2])  # (G, O / G, P)
        for_x = for_weight = for_bias = None
        if self.needs(1):
            for_weight = self.out(1)
            if for_weight is None:
                for_weight = xp.empty(self.weight.shape, dtype=flat.dtype)
            # A matrix product likes the longer side in front; the copy that turns it round is small.
            for_weight.reshape(self.matrix)[...] = product(columns, flat.swapaxes(1, 2)).swapaxes(1, 2)
        if self.needs(2):
            for_bias = total(flat.reshape(groups * out, flat.shape[2]), axis=1, out=self.out(2))
        if self.needs(0):
            c, n = self.weight.shape[1] * groups, len(grad)
            spread = product(weight.swapaxes(1, 2), flat).reshape(c, *window.kernel, *window.output, n)
            image = xp.zeros((c, *window.padded, n), dtype=flat.dtype)
            for i, j, seen in window.offsets():
                image[seen] += spread[:, i, j]
            for_x = batch_first(window.crop(image))
        return for_x, for_weight, for_bias


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Correlate images with kernels.

    Parameters
    ----------
    input : array or Tensor
        Shape (N, C, H, W), or (C, H, W).
    weight : array or Tensor
        Shape (O, C / groups, kh, kw).
    bias : array or Tensor, optional
        Shape (O).
    stride, padding, dilation : int or pair of int
        Step of the kernel, zeros around the image, distance between the kernel's pixels.
    groups : int, default 1
        Channels are split into this many independent groups.

    Returns
    -------
    Tensor
        Shape (N, O, H', W'), in memory (O, H', W', N).

    References
    ----------
    torch.nn.functional.conv2d.
    """
    if input.ndim == 3:
        batch = input.reshape((1, *input.shape))
        y = conv2d(batch, weight, bias, stride, padding, dilation, groups)
        return y.reshape(y.shape[1:])
    if input.ndim != 4:
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: {list(input.shape)}"
        )
    c = input.shape[1]
    if c != weight.shape[1] * groups or weight.shape[0] % groups:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(input.shape)} to have "
            f"{weight.shape[1] * groups} channels, but got {c} channels instead"
        )
    window = Window(input.shape[2:], weight.shape[2:], pair(stride), pair(padding), pair(dilation))
    return Conv2d.apply(input, weight, bias, window, groups)

"""Convolution as one matrix product. Imports ``autograd`` and ``window``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .window import Pair, Window, pair


class Conv2d(Function):
    """Correlation of images (N, C, H, W) with kernels (O, C / G, kh, kw) in G groups.

    Every pixel under every kernel position is copied into a matrix, by kernel position: as many strided copies as the kernel
    has pixels. The matrix is kept for backward; it is kh kw times as large as the input over the strides.
    """

    def forward(self, x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
        xp = array_namespace(x)
        self.window, self.groups, self.weight = window, groups, weight
        n, c, out = x.shape[0], x.shape[1], weight.shape[0]
        (kh, kw), (height, width) = window.kernel, window.output
        image = window.pad(x.transpose(1, 0, 2, 3))  # (C, N, H, W)
        columns = xp.empty((c, kh, kw, n, height, width), dtype=x.dtype)
        for i, j, seen in window.offsets():
            columns[:, i, j] = image[seen]
        self.columns = columns.reshape(groups, c // groups * kh * kw, n * height * width)  # (G, K, P)
        y = xp.matmul(weight.reshape(groups, out // groups, -1), self.columns)  # (G, O / G, P)
        if bias is not None:
            y += bias.reshape(groups, -1, 1)
        return y.reshape(out, n, height, width).transpose(1, 0, 2, 3)  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp = array_namespace(grad)
        window, groups, weight = self.window, self.groups, self.weight
        n, out = grad.shape[:2]
        flat = grad.transpose(1, 0, 2, 3).reshape(groups, out // groups, -1)  # (G, O / G, P)
        for_x = for_weight = for_bias = None
        if self.needs(1):
            for_weight = self.out(1)
            if for_weight is None:
                for_weight = xp.empty(weight.shape, dtype=weight.dtype)
            xp.matmul(flat, self.columns.swapaxes(1, 2), out=for_weight.reshape(groups, out // groups, -1))
        if self.needs(2):
            for_bias = xp.add.reduce(flat.reshape(out, -1), axis=1, out=self.out(2))
        if self.needs(0):
            columns = xp.matmul(weight.reshape(groups, out // groups, -1).swapaxes(1, 2), flat)  # (G, K, P)
            c = groups * weight.shape[1]
            columns = columns.reshape(c, *window.kernel, n, *window.output)
            image = xp.zeros((c, n, *window.padded), dtype=grad.dtype)
            for i, j, seen in window.offsets():
                image[seen] += columns[:, i, j]
            for_x = window.crop(image).transpose(1, 0, 2, 3)
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
        Shape (N, O, H', W'), in memory (O, N, H', W').

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

"""Convolution. Imports ``autograd``, ``columns``, ``linear`` and ``window``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.half import product, total
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array

from .columns import Columns
from .linear import check_dtypes
from .window import Pair, Window, batch_first, batch_last, pair


class Conv2d(Function):
    """Correlation of images (N, C, H, W) with kernels (O, C / G, kh, kw) in G groups, as products of matrices."""

    def forward(self, x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
        xp = array_namespace(x)
        self.image = xp.ascontiguousarray(window.pad(batch_last(x)))  # (C, H, W, N)
        self.weight = weight
        self.columns = columns = Columns(window, self.image, groups, len(weight))
        matrix = weight.reshape(groups, len(weight) // groups, -1)  # (G, O / G, K)
        y = xp.empty((len(weight), *window.output, len(x)), dtype=x.dtype)
        for rows in columns.blocks():
            product(matrix, columns.gather(self.image, rows), out=columns.matrices(y, rows))
        if bias is not None:
            y += bias.reshape(-1, 1, 1, 1)
        return batch_first(y)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        grad = batch_last(grad)  # (O, H', W', N)
        return (
            self._for_image(grad) if self.needs(0) else None,
            self._for_weight(grad) if self.needs(1) else None,
            total(grad.reshape(len(grad), -1), axis=1, out=self.out(2)) if self.needs(2) else None,
        )

    def _for_image(self, grad: Array) -> Array:
        """Return the gradient of the input: what each position of the kernel takes back to the pixels that it saw."""
        xp, window, groups = array_namespace(grad), self.columns.window, self.columns.groups
        n, c = grad.shape[3], len(self.image)
        flat = grad.reshape(groups, len(grad) // groups, -1)  # (G, O / G, P)
        kernels = self.weight.reshape(*flat.shape[:2], -1, *window.kernel)
        by_position = xp.ascontiguousarray(kernels.transpose(3, 4, 0, 2, 1))  # (kh, kw, G, C / G, O / G)
        # On a device one launch makes all products; here each is added while it is in the cache.
        spread = product(by_position, flat) if is_device_array(flat) else None
        image = xp.zeros(self.image.shape, dtype=grad.dtype)
        for i, j, seen in window.offsets():
            back = product(by_position[i, j], flat) if spread is None else spread[i, j]
            image[seen] += back.reshape(c, *window.output, n)
        return batch_first(window.crop(image))

    def _for_weight(self, grad: Array) -> Array:
        """Return the gradient of the kernels, where it is wanted."""
        columns = self.columns
        # A matrix product likes the longer side in front; what turns it round in the end is small.
        matrix = sum(  # (G, K, O / G)
            product(columns.gather(self.image, rows), columns.matrices(grad, rows).swapaxes(-1, -2)).sum(axis=(0, 1))
            for rows in columns.blocks()
        )
        kernels = self.out(1)
        if kernels is None:
            kernels = array_namespace(grad).empty(self.weight.shape, dtype=grad.dtype)
        matrix = matrix.swapaxes(1, 2)
        kernels.reshape(matrix.shape)[...] = matrix
        return kernels


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

    Raises
    ------
    RuntimeError
        Shapes do not fit, or dtypes differ.

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
    check_dtypes("conv2d", input, weight)
    window = Window(input.shape[2:], weight.shape[2:], pair(stride), pair(padding), pair(dilation))
    return Conv2d.apply(input, weight, bias, window, groups)

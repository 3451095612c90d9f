"""Convolution of images by matrix products, as a function and as a layer."""

# mypy: disable-error-code="no-any-return"

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.arithmetic import product
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array, DTypeLike

from . import init
from .linear import check_dtypes
from .module import Layer
from .parameter import Parameter
from .window import Pair, Window, batch_first, batch_last, pair

_CACHE_BYTES = 512 << 10
"""Size of a block of `Columns`, small enough to stay in a core's cache between its copy and its product."""
_UNPACKED = 10**6
"""Largest number of multiplications in a product that OpenBLAS computes without packing (``SMALL_MATRIX_OPT``).

With few channels such a product takes half the time.
"""
_LEAST_COLUMNS = 128
"""Least number of columns of a matrix. Narrower matrices need more calls, which cost more time than they save."""


class Columns:
    """The C kh kw pixels behind each output pixel as a column of a matrix, for a block of output rows at a time.

    With stride 1 all columns together are about kh kw times as large as the image (C, H, W, N). So a block is made,
    used and dropped while it is in the cache. A block is a stack of matrices (..., K, P), with P columns of K = C kh kw
    pixels. On a device there is one block of one matrix. ``channels`` is the number of output channels.
    """

    def __init__(self, window: Window, image: Array, channels: int) -> None:
        self.window = window
        (height, width), (c, _, _, n) = window.output, image.shape
        self._size = c * math.prod(window.kernel)  # K
        self._parts = 0  # number of matrices for each row; 0 means one matrix for all rows of a block
        self._rows = height
        if is_device_array(image):
            return
        row = max(width * n, 1)
        row_bytes = self._size * row * image.dtype.itemsize
        self._rows = max(1, -(-_LEAST_COLUMNS // row), _CACHE_BYTES // row_bytes)
        for parts in range(1, row // _LEAST_COLUMNS + 1):
            if width % parts == 0 and self._size * channels * (row // parts) <= _UNPACKED:
                self._parts = parts
                break

    def blocks(self) -> Iterator[slice]:
        height = self.window.output[0]
        for first in range(0, height, self._rows):
            yield slice(first, min(first + self._rows, height))

    def gather(self, image: Array, rows: slice) -> Array:
        """Return the columns of a padded image (C, H, W, N) for ``rows`` of the output."""
        seen = self._stacked(self.window.seen(image)[:, :, :, rows])
        block = array_namespace(image).ascontiguousarray(seen)
        return block.reshape(*block.shape[:2], self._size, -1)

    def matrices(self, output: Array, rows: slice) -> Array:
        """Return ``rows`` of an output (O, H', W', N) as a stack (..., O, P)."""
        stacked = self._stacked(output[:, rows])
        return stacked.reshape(*stacked.shape[:2], len(output), -1)

    def _stacked(self, x: Array) -> Array:
        """Return ``x`` (..., rows, W', N) with two axes in front that number its matrices: rows, and parts of rows."""
        *others, rows, width, n = x.shape
        stack, parts = (rows, self._parts) if self._parts else (1, 1)
        cut = x.reshape(*others, stack, rows // stack, parts, width // parts, n)
        first, k = range(len(others)), len(others)
        return cut.transpose(k, k + 2, *first, k + 1, k + 3, k + 4)


class Conv2dFunction(Function):
    """Correlation of images (N, C, H, W) with kernels (O, C, kh, kw)."""

    def forward(self, x: Array, weight: Array, bias: Array | None, window: Window) -> Array:
        xp = array_namespace(x)
        self.image = xp.ascontiguousarray(window.pad(batch_last(x)))  # (C, H, W, N)
        self.weight = weight
        self.columns = columns = Columns(window, self.image, len(weight))
        matrix = weight.reshape(len(weight), -1)  # (O, K)
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
            grad.reshape(len(grad), -1).sum(axis=1, out=self.out(2)) if self.needs(2) else None,
        )

    def _for_image(self, grad: Array) -> Array:
        """Return the gradient of the input, a sum over the kernel's positions."""
        xp, window = array_namespace(grad), self.columns.window
        flat = grad.reshape(len(grad), -1)  # (O, P)
        by_position = xp.ascontiguousarray(self.weight.transpose(2, 3, 1, 0))  # (kh, kw, C, O)
        # A device makes all products in one launch. On the host each product is added while it is in the cache.
        spread = product(by_position, flat) if is_device_array(flat) else None
        image = xp.zeros(self.image.shape, dtype=grad.dtype)
        for i, j, seen in window.offsets():
            back = product(by_position[i, j], flat) if spread is None else spread[i, j]
            image[seen] += back.reshape(len(image), *window.output, -1)
        return batch_first(window.crop(image))

    def _for_weight(self, grad: Array) -> Array:
        columns = self.columns
        # A product with the longer side first is faster. In exchange the small result must be transposed at the end.
        matrix = sum(  # (K, O)
            product(columns.gather(self.image, rows), columns.matrices(grad, rows).swapaxes(-1, -2)).sum(axis=(0, 1))
            for rows in columns.blocks()
        )
        kernels = self.out(1)
        if kernels is None:
            kernels = array_namespace(grad).empty(self.weight.shape, dtype=grad.dtype)
        kernels.reshape(len(kernels), -1)[...] = matrix.T
        return kernels


def conv2d(input: Any, weight: Any, bias: Any = None, stride: Pair = 1, padding: Pair = 0) -> Tensor:
    """Correlate images (N, C, H, W) with kernels (O, C, kh, kw).

    The result (N, O, H', W') lies in memory as (O, H', W', N). ``stride`` and ``padding`` are ints or pairs of int;
    ``padding`` is the width of the zeros around the image.
    """
    if input.ndim != 4:
        raise RuntimeError(f"Expected images (N, C, H, W) as input of conv2d, but got size: {list(input.shape)}")
    if input.shape[1] != weight.shape[1]:
        raise RuntimeError(
            f"Given groups=1, weight of size {list(weight.shape)}, expected input{list(input.shape)} to have "
            f"{weight.shape[1]} channels, but got {input.shape[1]} channels instead"
        )
    check_dtypes("conv2d", input, weight)
    window = Window(input.shape[2:], weight.shape[2:], pair(stride), pair(padding))
    return Conv2dFunction.apply(input, weight, bias, window)


class Conv2d(Layer):
    """Layer of :func:`mpiddp.nn.functional.conv2d`, for images (N, in_channels, H, W)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        *,
        bias: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding = pair(kernel_size), pair(stride), pair(padding)
        self.weight = Parameter(np.empty((out_channels, in_channels, *self.kernel_size), dtype))
        self.register_parameter("bias", Parameter(np.empty(out_channels, dtype)) if bias else None)
        init.default_(self.weight, self.bias)

    def forward(self, input: Any) -> Tensor:
        return conv2d(input, self.weight, self.bias, self.stride, self.padding)

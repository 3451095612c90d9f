"""The matrices that make a convolution a matrix product. Imports ``device`` and ``window``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array

from .window import Window

_CACHE_BYTES = 512 << 10
"""What stays in a core's cache from the copy that makes a block to the product that reads it."""
_UNPACKED = 10**6
"""OpenBLAS does without packing its operands for products of up to so many multiplications (its ``SMALL_MATRIX_OPT``),
which takes half the time where matrices are as thin as with few channels."""
_LEAST_COLUMNS = 128
"""Matrices narrower than this are too many for too little."""


class Columns:
    """What the kernel sees from each of its places, a block of rows of the output at a time.

    A pixel of the output has a column, of the C kh kw pixels of the image that it is computed from. All columns are
    kh kw times the image, to be written to memory and read again; a block of them is made, used and forgotten in the
    cache. A block is a stack of matrices (..., G, K, P) for G groups of channels, P columns of K = C kh kw / G pixels
    each. On a device one block with one matrix a group is best.

    Parameters
    ----------
    window : Window
        The kernel, and where it goes.
    image : array
        The padded image (C, H, W, N), or one like it.
    groups : int
        G.
    channels : int
        Of the output: what a column is multiplied with.
    """

    def __init__(self, window: Window, image: Array, groups: int, channels: int) -> None:
        self.window, self.groups = window, groups
        (height, width), (c, _, _, n) = window.output, image.shape
        self._size = c * math.prod(window.kernel) // groups  # K
        self._parts = 0  # of a row, with a matrix each; 0: one matrix for all rows of a block
        self._rows = height
        if is_device_array(image) or image.dtype.itemsize < 4:  # half precision is rounded once
            return
        row = max(width * n, 1)
        row_bytes = self._size * groups * row * image.dtype.itemsize
        self._rows = max(1, -(-_LEAST_COLUMNS // row), _CACHE_BYTES // row_bytes)
        for parts in range(1, row // _LEAST_COLUMNS + 1):
            if width % parts == 0 and self._size * (channels // groups) * (row // parts) <= _UNPACKED:
                self._parts = parts
                break

    def blocks(self) -> Iterator[slice]:
        """Yield the rows of the output that each block is for."""
        height = self.window.output[0]
        for first in range(0, height, self._rows):
            yield slice(first, min(first + self._rows, height))

    def gather(self, image: Array, rows: slice) -> Array:
        """Return a block of a padded image (C, H, W, N)."""
        seen = self._stacked(self.window.seen(image)[:, :, :, rows])
        block = array_namespace(image).ascontiguousarray(seen)
        return block.reshape(*block.shape[:2], self.groups, self._size, -1)  # type: ignore[no-any-return]

    def matrices(self, output: Array, rows: slice) -> Array:
        """Return ``rows`` of an output (O, H', W', N) as a stack (..., G, O / G, P) like that of the block."""
        stacked = self._stacked(output[:, rows])
        return stacked.reshape(*stacked.shape[:2], self.groups, len(output) // self.groups, -1)

    def _stacked(self, x: Array) -> Array:
        """Return a view of (..., rows, W', N), in front of it what has matrices of its own: rows, and parts of rows."""
        *others, rows, width, n = x.shape
        stack, parts = (rows, self._parts) if self._parts else (1, 1)
        cut = x.reshape(*others, stack, rows // stack, parts, width // parts, n)
        first, k = range(len(others)), len(others)
        return cut.transpose(k, k + 2, *first, k + 1, k + 3, k + 4)

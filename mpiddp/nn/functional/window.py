"""Windows that slide over images: the arithmetic that convolution and pooling share.

An image batch has shape (N, C, H, W), and its memory may have any order. Convolution writes channel-major arrays, (C, N, H, W)
in memory seen through a transposition: one matrix product makes them and needs them, elementwise operations keep the order,
and so layers in sequence copy nothing. Imports ``device`` and ``typing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType

from mpiddp.device import array_namespace
from mpiddp.typing import Array

Pair = int | Sequence[int]
"""One number for both axes, or (vertical, horizontal)."""


def pair(value: Pair) -> tuple[int, int]:
    """Return ``value`` for both axes."""
    if isinstance(value, int):
        return value, value
    vertical, horizontal = value
    return int(vertical), int(horizontal)


class Window:
    """A kernel's extent, step, margin and spread, on images of one size.

    Parameters
    ----------
    image : tuple of int
        Height and width.
    kernel, stride, padding, dilation : pairs of int
        As torch's.
    """

    def __init__(
        self,
        image: tuple[int, int],
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> None:
        self.image, self.kernel, self.stride, self.padding, self.dilation = image, kernel, stride, padding, dilation
        self.padded = image[0] + 2 * padding[0], image[1] + 2 * padding[1]
        extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        if extent[0] > self.padded[0] or extent[1] > self.padded[1]:
            raise RuntimeError(
                f"Calculated padded input size per channel: ({self.padded[0]} x {self.padded[1]}). Kernel size: "
                f"({extent[0]} x {extent[1]}). Kernel size can't be greater than actual input size"
            )
        self.output = (
            (self.padded[0] - extent[0]) // stride[0] + 1,
            (self.padded[1] - extent[1]) // stride[1] + 1,
        )
        self.overlaps = stride[0] < extent[0] or stride[1] < extent[1]

    def offsets(self) -> Iterator[tuple[int, int, tuple[EllipsisType, slice, slice]]]:
        """Yield each position in the kernel and the index of what it sees: ``image[index]`` has the output's size."""
        (step_y, step_x), (height, width) = self.stride, self.output
        for i in range(self.kernel[0]):
            top = i * self.dilation[0]
            rows = slice(top, top + step_y * (height - 1) + 1, step_y)
            for j in range(self.kernel[1]):
                left = j * self.dilation[1]
                yield i, j, (..., rows, slice(left, left + step_x * (width - 1) + 1, step_x))

    def pad(self, image: Array, value: float = 0.0) -> Array:
        """Return ``image`` (..., H, W) with the margin."""
        if self.padding == (0, 0):
            return image
        padded = array_namespace(image).full((*image.shape[:-2], *self.padded), value, dtype=image.dtype)
        padded[self._inside()] = image
        return padded  # type: ignore[no-any-return]

    def crop(self, padded: Array) -> Array:
        """Return the view of ``padded`` without the margin."""
        return padded if self.padding == (0, 0) else padded[self._inside()]

    def _inside(self) -> tuple[EllipsisType, slice, slice]:
        """Return the index of the image in its padded version."""
        (top, left), (height, width) = self.padding, self.image
        return ..., slice(top, top + height), slice(left, left + width)

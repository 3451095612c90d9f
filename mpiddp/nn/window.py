"""Sliding windows over images, for convolution and pooling.

Images (N, C, H, W) lie in memory as (C, H, W, N): copies and sums of shifted windows run over W x N neighbours, one
product makes a convolution's output, and layers in sequence copy nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpiddp.device import array_namespace
from mpiddp.typing import Array, Shape

Pair = int | Sequence[int]
"""One number for both axes, or (vertical, horizontal)."""


def pair(value: Pair) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    vertical, horizontal = value
    return int(vertical), int(horizontal)


class Window:
    """Geometry of a kernel on images of one size; each argument is a pair (vertical, horizontal)."""

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
        extent = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
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
        self.covers = (
            kernel == stride
            and extent == kernel
            and self.padded == tuple(n * step for n, step in zip(self.output, stride, strict=True))
        )
        """Every pixel is in one window."""

    def offsets(self) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
        """Yield each position in the kernel, and the index of its pixels in a padded (C, H, W, N)."""
        (step_y, step_x), (height, width) = self.stride, self.output
        for i in range(self.kernel[0]):
            top = i * self.dilation[0]
            rows = slice(top, top + step_y * (height - 1) + 1, step_y)
            for j in range(self.kernel[1]):
                left = j * self.dilation[1]
                yield i, j, (slice(None), rows, slice(left, left + step_x * (width - 1) + 1, step_x))

    def seen(self, image: Array) -> Array:
        """Return a view of a padded image (C, H, W, N) by kernel and place: (C, kh, kw, H', W', N)."""
        (y, x), (down, right), (c, h, w, n) = self.stride, self.dilation, image.strides
        return array_namespace(image).lib.stride_tricks.as_strided(  # type: ignore[no-any-return]
            image,
            (image.shape[0], *self.kernel, *self.output, image.shape[3]),
            (c, down * h, right * w, y * h, x * w, n),
        )

    def pad(self, image: Array, value: float = 0.0) -> Array:
        if self.padding == (0, 0):
            return image
        padded = array_namespace(image).full(self.shape(image), value, dtype=image.dtype)
        padded[self._inside()] = image
        return padded  # type: ignore[no-any-return]

    def crop(self, padded: Array) -> Array:
        return padded if self.padding == (0, 0) else padded[self._inside()]

    def _inside(self) -> tuple[slice, slice, slice]:
        (top, left), (height, width) = self.padding, self.image
        return slice(None), slice(top, top + height), slice(left, left + width)

    def shape(self, image: Array) -> Shape:
        """Return the shape of ``image`` (C, H, W, N) with the margin."""
        return (image.shape[0], *self.padded, image.shape[3])


def batch_last(image: Array) -> Array:
    """Return (N, C, H, W) as (C, H, W, N)."""
    return image.transpose(1, 2, 3, 0)


def batch_first(image: Array) -> Array:
    """Return (C, H, W, N) as (N, C, H, W)."""
    return image.transpose(3, 0, 1, 2)

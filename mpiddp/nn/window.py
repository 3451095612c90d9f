"""Sliding windows over images, for convolution and pooling.

Images (N, C, H, W) lie in memory as (C, H, W, N). Copies and sums of shifted windows then run over W x N neighbours.
Matrix products write a convolution's output in this layout, so layers in sequence need no copy to another layout.
"""

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
        self, image: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
    ) -> None:
        self.image, self.kernel, self.stride, self.padding = image, kernel, stride, padding
        self.padded = image[0] + 2 * padding[0], image[1] + 2 * padding[1]
        if kernel[0] > self.padded[0] or kernel[1] > self.padded[1]:
            raise RuntimeError(
                f"Calculated padded input size per channel: ({self.padded[0]} x {self.padded[1]}). Kernel size: "
                f"({kernel[0]} x {kernel[1]}). Kernel size can't be greater than actual input size"
            )
        self.output = (self.padded[0] - kernel[0]) // stride[0] + 1, (self.padded[1] - kernel[1]) // stride[1] + 1
        self.overlaps = stride[0] < kernel[0] or stride[1] < kernel[1]
        self.covers = kernel == stride and self.padded[0] % stride[0] == self.padded[1] % stride[1] == 0
        """True if every pixel of the padded image is in exactly one window."""

    def offsets(self) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
        """Yield each position in the kernel, with the index of the pixels at it in a padded image (C, H, W, N)."""
        (step_y, step_x), (height, width) = self.stride, self.output
        for i in range(self.kernel[0]):
            rows = slice(i, i + step_y * (height - 1) + 1, step_y)
            for j in range(self.kernel[1]):
                yield i, j, (slice(None), rows, slice(j, j + step_x * (width - 1) + 1, step_x))

    def seen(self, image: Array) -> Array:
        """Return all windows of a padded image (C, H, W, N) as a view (C, kh, kw, H', W', N)."""
        (y, x), (c, h, w, n) = self.stride, image.strides
        return array_namespace(image).lib.stride_tricks.as_strided(  # type: ignore[no-any-return]
            image, (image.shape[0], *self.kernel, *self.output, image.shape[3]), (c, h, w, y * h, x * w, n)
        )

    def pad(self, image: Array, value: float = 0.0) -> Array:
        """Return an image (C, H, W, N) with a margin of ``value`` around it."""
        if self.padding == (0, 0):
            return image
        shape: Shape = (image.shape[0], *self.padded, image.shape[3])
        padded = array_namespace(image).full(shape, value, dtype=image.dtype)
        padded[self._inside()] = image
        return padded  # type: ignore[no-any-return]

    def crop(self, padded: Array) -> Array:
        """Return an image without its margin."""
        return padded if self.padding == (0, 0) else padded[self._inside()]

    def _inside(self) -> tuple[slice, slice, slice]:
        (top, left), (height, width) = self.padding, self.image
        return slice(None), slice(top, top + height), slice(left, left + width)


def batch_last(image: Array) -> Array:
    """Return (N, C, H, W) as (C, H, W, N)."""
    return image.transpose(1, 2, 3, 0)


def batch_first(image: Array) -> Array:
    """Return (C, H, W, N) as (N, C, H, W)."""
    return image.transpose(3, 0, 1, 2)

"""Pooling layers. Imports ``functional`` and ``module``."""

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Tensor

from . import functional as F  # noqa: N812 (its customary name)
from .functional.window import Pair
from .module import Module


class _Pool2d(Module):
    """What pooling layers are made of."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        super().__init__()
        self.kernel_size, self.padding = kernel_size, padding
        self.stride = kernel_size if stride is None else stride

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2d(_Pool2d):
    """The largest value of each window (:func:`mpiddp.nn.functional.max_pool2d`)."""

    def forward(self, input: Any) -> Tensor:
        """Return the pooled images."""
        return F.max_pool2d(input, self.kernel_size, self.stride, self.padding)


class AvgPool2d(_Pool2d):
    """The mean of each window (:func:`mpiddp.nn.functional.avg_pool2d`)."""

    def forward(self, input: Any) -> Tensor:
        """Return the pooled images."""
        return F.avg_pool2d(input, self.kernel_size, self.stride, self.padding)


class AdaptiveAvgPool2d(Module):
    """Means over as many windows as the output has pixels (:func:`mpiddp.nn.functional.adaptive_avg_pool2d`).

    Parameters
    ----------
    output_size : int or pair of (int or None)
        Height and width of the output; None keeps the input's.
    """

    def __init__(self, output_size: int | tuple[int | None, int | None]) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, input: Any) -> Tensor:
        """Return the pooled images."""
        return F.adaptive_avg_pool2d(input, self.output_size)

    def extra_repr(self) -> str:
        """Return the output's size."""
        return f"output_size={self.output_size}"

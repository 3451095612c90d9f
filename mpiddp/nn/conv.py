"""The convolution layer. Imports ``functional``, ``init``, ``module`` and ``parameter``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.typing import DTypeLike

from . import functional as F  # noqa: N812 (its customary name)
from . import init
from .functional.window import Pair, pair
from .module import Module
from .parameter import Parameter


class Conv2d(Module):
    """Correlation of images (N, in_channels, H, W) with learned kernels.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels of input and output.
    kernel_size, stride, padding, dilation : int or pair of int
        As :func:`mpiddp.nn.functional.conv2d`'s.
    groups : int, default 1
        Independent groups of channels.
    bias : bool, default True
        Whether there is a bias.
    dtype : dtype, default float32
        Of the parameters.

    References
    ----------
    torch.nn.Conv2d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if in_channels % groups:
            raise ValueError("in_channels must be divisible by groups")
        if out_channels % groups:
            raise ValueError("out_channels must be divisible by groups")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = pair(kernel_size), pair(stride)
        self.padding, self.dilation = pair(padding), pair(dilation)
        self.weight = Parameter(np.empty((out_channels, in_channels // groups, *self.kernel_size), dtype))
        self.register_parameter("bias", Parameter(np.empty(out_channels, dtype)) if bias else None)
        init.default_(self.weight, self.bias)

    def forward(self, input: Any) -> Tensor:
        """Return the correlation of ``input``."""
        return F.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Return the sizes, and what is not at its default."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if self.padding != (0, 0):
            text += f", padding={self.padding}"
        if self.dilation != (1, 1):
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        return text if self.bias is not None else text + ", bias=False"

"""The affine layer. Imports ``functional``, ``init``, ``module`` and ``parameter``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.typing import DTypeLike

from . import functional as F  # noqa: N812 (its customary name)
from . import init
from .module import Module
from .parameter import Parameter


class Linear(Module):
    """``x @ weight.T + bias``.

    Parameters
    ----------
    in_features, out_features : int
        Lengths of the last axis of input and output.
    bias : bool, default True
        Whether there is a bias.
    dtype : dtype, default float32
        Of the parameters.

    References
    ----------
    torch.nn.Linear.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: DTypeLike = np.float32
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(np.empty((out_features, in_features), dtype))
        self.register_parameter("bias", Parameter(np.empty(out_features, dtype)) if bias else None)
        init.default_(self.weight, self.bias)

    def forward(self, input: Any) -> Tensor:
        """Return the map of ``input`` (..., in_features)."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

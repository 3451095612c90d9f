"""Dropout layers. Imports ``functional`` and ``module``."""

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Tensor

from . import functional as F  # noqa: N812 (its customary name)
from .module import Module


class Dropout(Module):
    """In training, set each value to 0 with probability ``p`` and scale the others by 1 / (1 - p).

    Parameters
    ----------
    p : float, default 0.5
        From 0 to 1.

    Raises
    ------
    ValueError
        If it is not.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p = p

    def forward(self, input: Any) -> Tensor:
        """Return what is left."""
        return F.dropout(input, self.p, self.training)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


class Dropout2d(Dropout):
    """In training, set whole channels to 0 with probability ``p`` and scale the others by 1 / (1 - p).

    Parameters
    ----------
    p : float, default 0.5
        From 0 to 1. Inputs are images (N, C, H, W) or (C, H, W).
    """

    def forward(self, input: Any) -> Tensor:
        """Return what is left."""
        return F.dropout2d(input, self.p, self.training)

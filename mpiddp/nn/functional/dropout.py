"""Dropout. Imports ``autograd`` and ``nn.random``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.typing import Array

from ..random import keep_mask


class Dropout(Function):
    """The values times 0 or 1 / (1 - p); the last ``shared`` axes have one factor for all."""

    def forward(self, x: Array, p: float, shared: int) -> Any:
        index: Any = (..., *(slice(1),) * shared)
        self.mask = keep_mask(x[index], p)
        return x * self.mask

    def backward(self, grad: Array) -> Any:
        return grad * self.mask


def _dropped(input: Any, p: float, training: bool, shared: int) -> Tensor:
    """Drop in training; else return the input as it is."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if training:
        return Dropout.apply(input, p, shared)
    return input if isinstance(input, Tensor) else Tensor(input)


def dropout(input: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """Set each value to 0 with probability ``p`` and scale the others by 1 / (1 - p)."""
    return _dropped(input, p, training, shared=0)


def dropout2d(input: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """Set whole channels of images (N, C, H, W) to 0 with probability ``p`` and scale the others by 1 / (1 - p)."""
    if input.ndim not in (3, 4):
        raise ValueError(f"dropout2d needs images of shape (N, C, H, W) or (C, H, W), got {input.ndim} axes")
    return _dropped(input, p, training, shared=2)

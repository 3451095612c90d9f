"""Joining and padding. Imports ``autograd``."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.autograd import Tensor, cat, stack
from mpiddp.autograd.shaping import Pad


def pad(input: Any, pad: Sequence[int], value: float = 0.0) -> Tensor:
    """Put a constant around a tensor.

    Parameters
    ----------
    input : array or Tensor
        Any shape.
    pad : sequence of int
        Widths before and after the last axis, then the one before it, and so on; negative ones cut.
    value : float, default 0
        The constant.
    """
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise RuntimeError(
            f"Padding length must be divisible by 2 and at most twice the number of dimensions of the input, got {pad} "
            f"for {input.ndim} dimensions"
        )
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs[::-1]
    return Pad.apply(input, tuple(widths), value)


__all__ = ["cat", "pad", "stack"]

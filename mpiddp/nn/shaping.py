"""Padding and flattening."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.autograd import Tensor
from mpiddp.autograd.shaping import Pad

from .module import Module


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad with a constant ``value``, 0 by default, torch's only ``mode`` here.

    ``pad`` has widths before and after the last axis, then the one before it, and so on; negative ones cut.
    """
    if mode != "constant":
        raise NotImplementedError(f"pad has mode 'constant' only, got {mode!r}: use numpy.pad on inputs")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise RuntimeError(
            f"Padding length must be divisible by 2 and at most twice the number of dimensions of the input, got {pad} "
            f"for {input.ndim} dimensions"
        )
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs[::-1]
    return Pad.apply(input, tuple(widths), value or 0.0)


class Flatten(Module):
    """Joins the axes from ``start_dim`` to ``end_dim``, by default all but the batch's."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Any) -> Tensor:
        tensor = input if isinstance(input, Tensor) else Tensor(input)
        return tensor.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"

"""The affine map. Imports ``autograd``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array


class Linear(Function):
    """``x @ weight.T + bias`` for x of shape (..., in), weight (out, in), bias (out) or None."""

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        self.shape = x.shape
        self.weight = weight
        self.rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # (N, in)
        y = array_namespace(x).matmul(self.rows, weight.T)
        if bias is not None:
            y += bias
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp = array_namespace(grad)
        rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])  # (N, out)
        return (
            xp.matmul(rows, self.weight).reshape(self.shape) if self.needs(0) else None,
            xp.matmul(rows.T, self.rows, out=self.out(1)) if self.needs(1) else None,
            xp.add.reduce(rows, axis=0, out=self.out(2)) if self.needs(2) else None,
        )


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return ``input @ weight.T + bias``.

    Parameters
    ----------
    input : array or Tensor
        Shape (..., in).
    weight : array or Tensor
        Shape (out, in).
    bias : array or Tensor, optional
        Shape (out).

    Returns
    -------
    Tensor
        Shape (..., out).
    """
    if input.shape[-1] != weight.shape[1]:
        rows = 1
        for length in input.shape[:-1]:
            rows *= length
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({rows}x{input.shape[-1]} and {weight.shape[1]}x{weight.shape[0]})"
        )
    return Linear.apply(input, weight, bias)

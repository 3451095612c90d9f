"""Dropout, as functions and as layers."""

# mypy: disable-error-code="no-any-return"

from typing import Any

from mpiddp.autograd import Function, Tensor
from mpiddp.typing import Array

from .module import Layer
from .random import keep_mask


class DropoutFunction(Function):
    """Multiplication by random factors, 0 or 1 / (1 - p). The last ``shared`` axes have one factor together."""

    def forward(self, x: Array, p: float, shared: int) -> Any:
        index: Any = (..., *(slice(1),) * shared)
        self.mask = keep_mask(x[index], p)
        return x * self.mask

    def backward(self, grad: Array) -> Any:
        return grad * self.mask


def _dropped(input: Any, p: float, training: bool, shared: int) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if training:
        return DropoutFunction.apply(input, p, shared)
    return input if isinstance(input, Tensor) else Tensor(input)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set each value to 0 with probability ``p`` and scale the others by 1 / (1 - p), if ``training``."""
    return _dropped(input, p, training, shared=0)


def dropout2d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply :func:`dropout` to whole channels of images (N, C, H, W)."""
    if input.ndim != 4:
        raise ValueError(f"dropout2d needs images of shape (N, C, H, W), got {input.ndim} axes")
    return _dropped(input, p, training, shared=2)


class Dropout(Layer):
    """Layer of :func:`mpiddp.nn.functional.dropout`, active in training."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        self.p = p

    def forward(self, input: Any) -> Tensor:
        return dropout(input, self.p, self.training)


class Dropout2d(Dropout):
    """Layer of :func:`mpiddp.nn.functional.dropout2d`, active in training."""

    def forward(self, input: Any) -> Tensor:
        return dropout2d(input, self.p, self.training)

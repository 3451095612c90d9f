"""Operations on several tensors, none of which is more the subject than the others. Imports ``tensor``."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import arithmetic, shaping
from .function import as_array
from .tensor import Tensor


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Return tensors one after the other along an axis that they have.

    Examples
    --------
    >>> from mpiddp.autograd import Tensor, cat
    >>> cat([Tensor([1.0, 2.0]), Tensor([3.0])]).tolist()
    [1.0, 2.0, 3.0]
    """
    return shaping.Join.apply(dim, *tensors)


def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Return tensors of one shape one after the other along a new axis."""
    return cat([_tensor(tensor).unsqueeze(dim) for tensor in tensors], dim)


def where(condition: Any, input: Any, other: Any) -> Tensor:
    """Return ``input`` where ``condition`` holds and ``other`` elsewhere."""
    return arithmetic.Where.apply(condition, input, other)


def maximum(input: Any, other: Any) -> Tensor:
    """Return the larger of two values, element by element; equal ones share the gradient."""
    return arithmetic.Maximum.apply(input, other)


def minimum(input: Any, other: Any) -> Tensor:
    """Return the smaller of two values, element by element; equal ones share the gradient."""
    return arithmetic.Minimum.apply(input, other)


def _tensor(operand: Any) -> Tensor:
    """Return a tensor as it is, and an array as a tensor."""
    return operand if isinstance(operand, Tensor) else Tensor(as_array(operand))

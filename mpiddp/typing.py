"""The types that signatures are written in. Imports NumPy only."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array, or a CuPy array, which behaves as one."""


@runtime_checkable
class HoldsArray(Protocol):
    """Anything that holds an array, such as :class:`mpiddp.autograd.Tensor`.

    The one attribute by which the communication layer, which knows nothing of autograd, sees through a tensor. The
    property raises :class:`~mpiddp.errors.ArrayError` where writing behind autograd's back would be wrong.
    """

    @property
    def __mpiddp_array__(self) -> Array: ...


ArrayLike: TypeAlias = Array | HoldsArray
"""An argument of every operation."""

DTypeLike: TypeAlias = npt.DTypeLike
Shape: TypeAlias = tuple[int, ...]

__all__ = ["Array", "ArrayLike", "DTypeLike", "HoldsArray", "Shape"]

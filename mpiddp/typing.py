"""The types in signatures of mpiddp. The module imports NumPy only."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array, or a CuPy array, which behaves as one."""


@runtime_checkable
class HoldsArray(Protocol):
    """Anything that holds an array, such as :class:`mpiddp.autograd.Tensor`.

    The communication layer knows nothing of autograd, and takes a tensor's array by this attribute. The property raises
    :class:`~mpiddp.errors.ArrayError` if the array must not be written to without autograd knowing.
    """

    @property
    def __mpiddp_array__(self) -> Array: ...


ArrayLike: TypeAlias = Array | HoldsArray
"""The arrays in signatures of operations. An operation also takes arrays of other libraries, for which there is no type
here."""

DTypeLike: TypeAlias = npt.DTypeLike
Shape: TypeAlias = tuple[int, ...]

__all__ = ["Array", "ArrayLike", "DTypeLike", "HoldsArray", "Shape"]

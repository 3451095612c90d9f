"""The library of an array, NumPy or CuPy (``xp``, as in array-api-compat).

CuPy is looked up in ``sys.modules``, so a process that uses no GPU never imports it.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from mpiddp.typing import Array


def cupy() -> Any:
    """Return CuPy, whose first import takes a second."""
    return sys.modules.get("cupy") or importlib.import_module("cupy")


def cupy_is_loaded() -> bool:
    """Return True if CuPy has been imported. Otherwise no array can be on a device."""
    return "cupy" in sys.modules


def is_device_array(x: object) -> bool:
    """Return True for a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_masked(x: object) -> bool:
    """Return True for a masked array.

    The check does not import ``numpy.ma``, which takes a tenth of a job's start. A program that has a masked array has
    imported that module.
    """
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def array_namespace(x: object) -> Any:
    """Return ``numpy`` or ``cupy``."""
    return sys.modules["cupy"] if is_device_array(x) else np


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make an uninitialised array on the current device."""
    return cupy().empty(shape, dtype)  # type: ignore[no-any-return]


def over(address: int, size_bytes: int, dtype: np.dtype[Any], place: int, owner: object) -> Array:
    """Return a flat array over another library's memory, which ``owner`` keeps alive.

    The call takes a tenth of the time of DLPack.
    """
    cuda = cupy().cuda
    memory = cuda.MemoryPointer(cuda.UnownedMemory(address, size_bytes, owner, place), 0)
    return cupy().ndarray(size_bytes // dtype.itemsize, dtype, memory)  # type: ignore[no-any-return]


def device_arrays_of(args: Iterable[object]) -> Iterator[Array]:
    """Yield the device arrays among ``args``, also those in lists and tuples."""
    for each in args:
        if isinstance(each, (list, tuple)):
            yield from device_arrays_of(each)
        elif is_device_array(each):
            yield cast(Array, each)

"""The library of an array, NumPy or CuPy (``xp``, as in array-api-compat).

CuPy is looked up in ``sys.modules``: a process on the host never imports it.
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
    """Return False in a process on the host, where no array can be on a device."""
    return "cupy" in sys.modules


def is_device_array(x: object) -> bool:
    """Return True for a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_masked(x: object) -> bool:
    """Return True for a masked array, whose module takes a tenth of a job's start; who has one has imported it."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def array_namespace(x: object) -> Any:
    """Return ``numpy`` or ``cupy``."""
    return sys.modules["cupy"] if is_device_array(x) else np


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make an uninitialised array on the current device."""
    return cupy().empty(shape, dtype)  # type: ignore[no-any-return]


def over(address: int, size_bytes: int, dtype: np.dtype[Any], place: int, owner: object) -> Array:
    """Return a flat array over another library's memory, which ``owner`` keeps. It takes a tenth of DLPack's time."""
    cuda = cupy().cuda
    memory = cuda.MemoryPointer(cuda.UnownedMemory(address, size_bytes, owner, place), 0)
    return cupy().ndarray(size_bytes // dtype.itemsize, dtype, memory)  # type: ignore[no-any-return]


def device_arrays_of(args: Iterable[object]) -> Iterator[Array]:
    """Return the device arrays among ``args``, also in lists."""
    for each in args:
        if isinstance(each, (list, tuple)):
            yield from device_arrays_of(each)
        elif is_device_array(each):
            yield cast(Array, each)

"""A fake of CuPy: host memory behind CuPy's names, with work that is done late (see ``_late``).

For tests of the code that works on devices, where there is none. It knows what mpiddp uses of CuPy and is strict where
CuPy is: no NumPy array among its arrays, none of its arrays as a NumPy array, asynchronous copies from pinned memory
only.
"""

from typing import Any

import numpy as np

from . import _late, _memory, cuda, lib
from ._array import array, call, ndarray

__version__ = "14.0.0+fake"
_CREATING = ("zeros", "ones", "full", "arange", "eye", "linspace", "identity", "tri")


def is_available() -> bool:
    """Say that there is a device."""
    return True


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """Return memory with holes in it."""
    return ndarray(shape, dtype)


def empty_like(prototype: ndarray, dtype: Any = None, shape: Any = None, **_: Any) -> ndarray:
    """Return memory for an array like another."""
    return ndarray(prototype.shape if shape is None else shape, dtype or prototype.dtype)


def asarray(a: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    """Return an array on the device."""
    return array(a, dtype, copy=False)


class _Host:
    """Memory of another library's device, which is the host's here, as NumPy takes it."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self._x.__dlpack__(stream=_late.get_current_stream().ptr or 1)


def from_dlpack(x: Any) -> ndarray:
    """Return an array over the memory of another library's."""
    assert x.__dlpack_device__()[0] == 2, "CuPy takes CUDA's memory only"
    host = np.from_dlpack(_Host(x))
    memory = _memory.UnownedMemory(host.__array_interface__["data"][0], host.nbytes, host, x.__dlpack_device__()[1])
    return ndarray(host.shape, host.dtype, _memory.MemoryPointer(memory, 0), host.strides)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """Return an array that lies in one piece, of one dimension at least."""
    a = asarray(a, dtype)
    return (a if a.flags.c_contiguous else a.copy()) if a.ndim else a.reshape(1)


def asnumpy(a: Any, *_: Any, **__: Any) -> np.ndarray:
    """Return an array on the host, after waiting for it."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


class _Pool:
    def total_bytes(self) -> int:
        return _memory.pooled_bytes()


def get_default_memory_pool() -> _Pool:
    """Return the pool of which arrays are made."""
    return _Pool()


def may_share_memory(a: ndarray, b: ndarray) -> bool:
    """Tell whether two arrays' memory may overlap."""
    return bool(np.may_share_memory(a._host, b._host))


shares_memory = may_share_memory


def __getattr__(name: str) -> Any:
    """Return what NumPy calls so: types and numbers as they are, functions for arrays on the device."""
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found
    if name in _CREATING:
        return lambda *args, **kwargs: array(found(*args, **kwargs))
    if name in ("dtype", "result_type", "promote_types", "can_cast", "issubdtype", "isscalar", "ndim", "shape", "size"):
        return found

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(found, *args, **kwargs)

    function.__name__ = name
    if isinstance(found, np.ufunc):
        vars(function).update(
            reduce=lambda *args, **kwargs: call(found.reduce, *args, **kwargs),
            at=lambda *args: call(found.at, *args),
        )
    return function


__all__ = ["array", "cuda", "lib", "ndarray"]

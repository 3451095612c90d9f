"""Arrays of other libraries: their memory as an array of NumPy or CuPy, without a copy.

Whatever offers DLPack (torch, JAX, TensorFlow and others), ``__cuda_array_interface__`` (Numba, PyCUDA),
``__array_interface__`` or Python's buffer protocol can be communicated: an operation's result lands in the caller's own
memory. Who made it is never asked, so none of these libraries is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any

import numpy as np

from mpiddp import device
from mpiddp.typing import Array

_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost and kDLROCMHost: NumPy reads them
_BFLOAT = 4  # kDLBfloat, which NumPy does not know
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


def adopt(x: Any) -> Array | None:
    """Return an array over the memory of ``x``, or None where ``x`` offers none.

    Parameters
    ----------
    x : object
        Of any library. NumPy's scalars and ``bytes`` are values and not memory: they offer none.

    Returns
    -------
    array or None
        NumPy's for memory of the host, CuPy's for that of a GPU; read-only where ``x`` says so. It keeps the memory.

    Raises
    ------
    Exception
        What the library of ``x`` raises when it cannot give its memory away, such as torch's ``BufferError`` for a
        tensor that requires a gradient.

    References
    ----------
    DLPack 1.0, https://dmlc.github.io/dlpack; CUDA array interface 3, NumPy's array interface 3, PEP 688.
    """
    if isinstance(x, np.generic | bytes):
        return None
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind, _ = x.__dlpack_device__()
        return _from_dlpack(x) if kind in _HOST else device.dlpack.adopt(x)
    if hasattr(x, "__cuda_array_interface__"):
        return device.dlpack.adopt(x)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        return None


def _from_dlpack(x: Any) -> Array:
    try:
        return np.from_dlpack(x)
    except (RuntimeError, BufferError):  # "Unsupported dtype in DLTensor", before NumPy 2.5 and since
        found = _bfloat16(x)
        if found is None:
            raise
        return found


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _Memory:
    """Memory under NumPy's array interface; keeps the capsule that owns it."""

    def __init__(self, capsule: object, interface: dict[str, Any]) -> None:
        self._capsule = capsule
        self.__array_interface__ = interface


def _bfloat16(x: Any) -> Array | None:
    """Return a bfloat16 array over memory of the host that DLPack describes, None where it holds something else.

    Raises
    ------
    TypeError
        If the package that has the dtype is not installed.
    """
    capsule, tensor, read_only = _described(x)
    if (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) != (_BFLOAT, 16, 1):
        return None
    try:
        dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise TypeError("NumPy has no bfloat16 of its own: pip install ml_dtypes") from None
    shape = tuple(tensor.shape[: tensor.ndim])
    # Where strides are left out, the array is C-contiguous.
    strides = tuple(2 * n for n in tensor.strides[: tensor.ndim]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset if math.prod(shape) else 0
    interface = {"shape": shape, "typestr": "<u2", "data": (address, read_only), "strides": strides, "version": 3}
    found: Array = np.asarray(_Memory(capsule, interface)).view(dtype)
    return found


def _described(x: Any) -> tuple[object, _Tensor, bool]:
    """Return the capsule that ``x`` exports, what it describes, and whether it is read-only."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # an older exporter
        capsule = x.__dlpack__()
    if ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(capsule), b"dltensor_versioned"):
        managed = _Versioned.from_address(pointer(capsule, b"dltensor_versioned"))
        return capsule, managed.tensor, bool(managed.flags & _READ_ONLY)
    # Before version 1 nothing said whether memory may be written to, so it may not: what NumPy, too, makes of it.
    return capsule, _Tensor.from_address(pointer(capsule, b"dltensor")), True

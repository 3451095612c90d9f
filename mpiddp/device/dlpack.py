"""GPU arrays of other libraries as CuPy arrays, without a copy."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from mpiddp.typing import Array

from .choice import cuda_fault
from .namespace import expect_bfloat16


def is_read_only(x: Any) -> bool:
    """Return True if the owner of GPU memory forbids writes.

    CuPy's arrays cannot say it, nor can DLPack before 1.0; the CUDA array interface does.
    """
    with contextlib.suppress(Exception):  # its library's errors, where the interface does not know the dtype
        return bool(x.__cuda_array_interface__["data"][1])
    return False


def adopt(x: Any) -> Array:
    """Return a CuPy array over the memory of an object with ``__dlpack__`` or ``__cuda_array_interface__``.

    Its library's current stream is ordered before CuPy's, not after it: writes by CuPy are seen on the same stream,
    such as the default one, and elsewhere after a synchronisation.
    """
    fault = cuda_fault()
    if fault is not None:
        raise TypeError(f"its memory is on a GPU, and arrays there are CuPy's to communicate: {fault}")
    if str(getattr(x, "dtype", "")).endswith("bfloat16"):  # torch.bfloat16, for one
        expect_bfloat16()
    cupy = importlib.import_module("cupy")
    found: Array = cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
    return found

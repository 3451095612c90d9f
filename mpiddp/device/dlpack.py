"""GPU arrays of other libraries as CuPy arrays, without a copy."""

import contextlib
from typing import Any

from mpiddp.typing import Array

from .choice import cuda_fault
from .namespace import cupy


def is_read_only(x: Any) -> bool:
    """Return True if the CUDA array interface of ``x`` marks it as read-only.

    CuPy does not know this property, nor does DLPack before 1.0.
    """
    with contextlib.suppress(Exception):  # errors of the library that made x
        return bool(x.__cuda_array_interface__["data"][1])
    return False


def adopt(x: Any) -> Array:
    """Return a CuPy array over the memory of ``x``.

    CuPy's current stream waits for the current stream of the library that made ``x``. The other way round nothing
    waits: that library sees CuPy's writes only after a synchronisation.
    """
    fault = cuda_fault()
    if fault is not None:
        raise TypeError(f"its memory is on a GPU, and arrays there are CuPy's to communicate: {fault}")
    return cupy().from_dlpack(x) if hasattr(x, "__dlpack__") else cupy().asarray(x)  # type: ignore[no-any-return]

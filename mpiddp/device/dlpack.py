"""GPU arrays of other libraries as CuPy arrays, without a copy."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from mpiddp.typing import Array

from .choice import cuda_fault
from .namespace import expect_bfloat16


def is_read_only(x: Any) -> bool:
    """Return True if the owner of GPU memory forbids writes, which CuPy's arrays cannot say.

    The CUDA array interface says it; DLPack before 1.0, which most libraries export, does not.
    """
    with contextlib.suppress(Exception):  # errors of its library, where the interface does not know the dtype
        return bool(x.__cuda_array_interface__["data"][1])
    return False


def adopt(x: Any) -> Array:
    """Return a CuPy array over the GPU memory of ``x``.

    Both protocols order kernels of its library, on its current stream, before CuPy's on CuPy's current stream. Nothing
    orders the other direction: writes on CuPy's stream are seen by the other library on the same stream, such as the
    default one, and on other streams after a synchronisation.

    Parameters
    ----------
    x : object
        With ``__dlpack__``, or with ``__cuda_array_interface__``.

    Raises
    ------
    TypeError
        If CuPy cannot be used in this process, or knows no bfloat16 and that is what it is.
    """
    fault = cuda_fault()
    if fault is not None:
        raise TypeError(f"its memory is on a GPU, and arrays there are CuPy's to communicate: {fault}")
    if str(getattr(x, "dtype", "")).endswith("bfloat16"):  # torch.bfloat16, for one
        expect_bfloat16()
    cupy = importlib.import_module("cupy")
    found: Array = cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
    return found

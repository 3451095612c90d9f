"""What ``Module.to`` does to each array: moved to a device, or cast. Imports ``device``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.device import cuda_fault, current_device, device_count
from mpiddp.device.place import Place, moved
from mpiddp.typing import Array

_TAKES = 'to() takes "cpu", "cuda", "cuda:N", the number of a GPU, or a floating dtype'


def conversion(wanted: Any) -> Callable[[Array], Array]:
    """Return a function that gives an array as ``Module.to(wanted)`` wants it, the same one where it is so already.

    Raises
    ------
    TypeError
        If it is neither a device nor a floating dtype.
    ValueError
        If there is no such device.
    """
    if isinstance(wanted, str) and re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        place = None if wanted == "cpu" else _gpu(int(wanted[5:]) if ":" in wanted else current_device())
        return lambda array: moved(array, place)
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        place = _gpu(wanted)
        return lambda array: moved(array, place)
    try:
        dtype = np.dtype(wanted)
    except TypeError:
        raise TypeError(f"{_TAKES}, got {wanted!r}") from None
    if wanted is None or not _is_floating(dtype):
        raise TypeError(f"{_TAKES}, got {wanted!r}")
    return lambda array: array.astype(dtype, copy=False) if _is_floating(array.dtype) else array


def _gpu(number: int) -> Place:
    """Return the number of a GPU that is there."""
    fault = cuda_fault()
    if fault is not None:
        raise ValueError(f"no model can be moved to cuda:{number}: {fault}")
    if not 0 <= number < device_count():
        raise ValueError(f"no model can be moved to cuda:{number}: this process sees {device_count()} GPUs")
    return number


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"

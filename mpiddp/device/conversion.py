"""What ``to()`` of tensors and modules makes of its arguments: a device, a dtype, or both."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import numpy as np

from mpiddp.typing import Array

from .choice import cuda_fault, current_device, device_count
from .half import converted
from .namespace import is_device_array
from .place import Place, moved, place_of

_TAKES = 'to() takes "cpu", "cuda", "cuda:N", the number of a GPU, a dtype, or an array'


class Conversion(NamedTuple):
    place: Place | Literal["kept"]
    dtype: np.dtype[Any] | None

    def __call__(self, x: Array) -> Array:
        """Return the same object if nothing changes."""
        if self.dtype is not None and x.dtype != self.dtype:
            x = converted(x, self.dtype)
        return x if self.place == "kept" else moved(x, self.place)


def conversion(device: Any, dtype: Any = None) -> Conversion:
    """Read torch's ``to(device, dtype)``, ``to(dtype)`` and ``to(other)``."""
    if isinstance(device, str) and re.fullmatch(r"cpu|cuda(:\d+)?", device):
        place = None if device == "cpu" else _gpu(int(device[5:]) if ":" in device else current_device())
        return Conversion(place, _dtype(dtype))
    if isinstance(device, int) and not isinstance(device, bool):
        return Conversion(_gpu(device), _dtype(dtype))
    if dtype is None and (isinstance(device, np.ndarray) or is_device_array(device)):
        return Conversion(place_of(device), device.dtype)
    if device is not None and dtype is not None:
        raise TypeError(f"{_TAKES}, got {device!r} as the device")
    if device is None and dtype is None:
        raise TypeError(f"{_TAKES}, got None")
    return Conversion("kept", _dtype(device if dtype is None else dtype))


def _dtype(value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        return np.dtype(value)  # type: ignore[no-any-return]
    except TypeError:
        raise TypeError(f"{_TAKES}, got {value!r}") from None


def _gpu(number: int) -> int:
    fault = cuda_fault()
    if fault is not None:
        raise ValueError(
            f"cannot move to cuda:{number}: {fault}. A program for hosts with and without GPUs moves to"
            ' "cuda" if mpiddp.device.device_count() else "cpu"'
        )
    if not 0 <= number < device_count():
        raise ValueError(f"cannot move to cuda:{number}: this process sees {device_count()} GPUs")
    return number

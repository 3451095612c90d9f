"""The place of an array, which is the number of a device, or None for the host; and moves to another place.

CuPy works on the thread's current device, wherever its arguments lie.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from mpiddp.typing import Array

from .choice import cuda_fault, current_device, device_count, in_use
from .half import converted
from .namespace import cupy, is_device_array
from .stream import follow, hold, ready
from .transfer import download

Place = int | None
_TAKES = 'to() takes "cpu", "cuda", "cuda:N", the number of a GPU, a dtype, or an array'


def here() -> int:
    return int(cupy().cuda.runtime.getDevice())


def place_of(x: Array) -> Place:
    return int(x.device.id) if is_device_array(x) else None  # type: ignore[attr-defined]


def moved(x: Array, place: Place) -> Array:
    """Return a copy of ``x`` at ``place``, in C order, or ``x`` itself if it is there already.

    The host waits only for a copy to the host. Between devices only streams wait: the copy waits for ``x``, and later
    work on the device of ``x`` waits for the copy.
    """
    if place_of(x) == place:
        return x
    if place is None:
        return download(x)
    xp = cupy()
    if not is_device_array(x):
        with xp.cuda.Device(place):
            return xp.asarray(x)  # type: ignore[no-any-return]
    with xp.cuda.Device(x.device.id):  # type: ignore[attr-defined]
        source = xp.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray gives a scalar an axis
    finished = ready(source)
    with xp.cuda.Device(place):
        follow(current_stream(place), finished)
        copy: Array = xp.array(source)
    hold(source, ready(copy))
    return copy


def current_stream(place: Place) -> Any:
    return None if place is None else cupy().cuda.get_current_stream(place)


@contextlib.contextmanager
def at(place: Place, stream: Any = None) -> Iterator[None]:
    """Make a device, and a stream if given, current in this thread."""
    nothing = contextlib.nullcontext()
    with nothing if place is None else cupy().cuda.Device(place), stream or nothing:
        yield


def stand_at(x: object) -> None:
    """Make the device of an array current in this thread from now on."""
    if is_device_array(x):
        x.device.use()  # type: ignore[attr-defined]


def returning() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that restores this thread's device after calls of `stand_at`."""
    return cupy().cuda.Device() if in_use() else contextlib.nullcontext()


class Conversion(NamedTuple):
    place: Place | Literal["kept"]
    dtype: np.dtype[Any] | None

    def __call__(self, x: Array) -> Array:
        """Return ``x`` converted, or ``x`` itself if nothing changes."""
        if self.dtype is not None and x.dtype != self.dtype:
            x = converted(x, self.dtype)
        return x if self.place == "kept" else moved(x, self.place)


def conversion(device: Any, dtype: Any = None) -> Conversion:
    """Return the conversion that arguments of torch's ``to(device, dtype)``, ``to(dtype)`` or ``to(other)`` mean."""
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

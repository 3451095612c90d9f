"""Places: a device by its number, or the host as None. Arrays are moved between them; work is done at one of them.

CuPy gives work to the device that is current in a thread, and memory too, wherever the arrays lie that it is given.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from mpiddp.typing import Array

from .choice import in_use
from .namespace import is_device_array
from .stream import follow, hold, ready
from .transfer import download

Place = int | None
"""Number of a device; None is the host."""


def _cupy() -> Any:
    return importlib.import_module("cupy")


def place_of(x: Array) -> Place:
    """Return where an array is."""
    return int(x.device.id) if is_device_array(x) else None  # type: ignore[attr-defined]


def moved(x: Array, place: Place) -> Array:
    """Return a copy of an array at another place, in C order; the array as it is where it is there already.

    Between devices the host does not wait: the device of the copy waits for the work that ``x`` comes from, and that of
    ``x`` lets nobody have its memory before it is copied. To the host it does.
    """
    if place_of(x) == place:
        return x
    if place is None:
        return download(x)
    cupy = _cupy()
    if not is_device_array(x):
        with cupy.cuda.Device(place):
            return cupy.asarray(x)  # type: ignore[no-any-return]
    with cupy.cuda.Device(x.device.id):  # type: ignore[attr-defined]
        source = cupy.ascontiguousarray(x)
    finished = ready(source)
    with cupy.cuda.Device(place):
        follow(current_stream(place), finished)
        copy: Array = cupy.array(source)
    hold(source, ready(copy))
    return copy


def current_stream(place: Place) -> Any:
    """Return the stream that is current at a place in this thread; None on the host."""
    return None if place is None else _cupy().cuda.get_current_stream(place)


@contextlib.contextmanager
def at(place: Place, stream: Any = None) -> Iterator[None]:
    """Make a device current in this thread, and a stream of it if one is given; on the host do nothing."""
    if place is None:
        yield
        return
    with _cupy().cuda.Device(place), contextlib.nullcontext() if stream is None else stream:
        yield


def stand_at(x: object) -> None:
    """Make the device of an array current in this thread until something else does; on the host do nothing."""
    if is_device_array(x):
        x.device.use()  # type: ignore[attr-defined]


@contextlib.contextmanager
def returning() -> Iterator[None]:
    """Make the device that is current in this thread current again afterwards, wherever `stand_at` went meanwhile."""
    if not in_use():
        yield
        return
    with _cupy().cuda.Device():
        yield

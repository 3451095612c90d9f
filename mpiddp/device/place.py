"""The place of an array: a device by its number, or the host as None.

CuPy works on the thread's current device, wherever its arguments lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mpiddp.typing import Array

from .choice import in_use
from .namespace import cupy, is_device_array
from .stream import follow, hold, ready
from .transfer import download

Place = int | None


def here() -> int:
    return int(cupy().cuda.runtime.getDevice())


def place_of(x: Array) -> Place:
    return int(x.device.id) if is_device_array(x) else None  # type: ignore[attr-defined]


def moved(x: Array, place: Place) -> Array:
    """Return a copy at another place, in C order; ``x`` itself if it lies there.

    The host waits only for a copy to itself. Between devices only streams wait: the copy waits for ``x``, and whoever
    uses the memory of ``x`` again waits for the copy.
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
    """Restore this thread's device after any `stand_at`."""
    return cupy().cuda.Device() if in_use() else contextlib.nullcontext()

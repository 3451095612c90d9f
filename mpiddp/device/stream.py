"""CUDA's streams, and marks (events) in them, for which operations wait instead of synchronising the device."""

import contextlib
import os
from collections.abc import Generator, Iterator
from typing import Any

from mpiddp.typing import Array

from .namespace import cupy

_REACHED, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_sides: dict[tuple[str, int], Any] = {}


class Mark:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def Test(self) -> bool:  # noqa: N802
        """Return True if the device has reached the mark. Raise CUDARuntimeError if the device has failed."""
        runtime = cupy().cuda.runtime
        # Event.done does not tell a failed device from a busy one.
        status = runtime.eventQuery(self.event.ptr)
        if status == _NOT_READY:
            # CUDA keeps this status as the thread's last error. CUB, by which CuPy sums, would take it for an error of
            # its own kernels and stop between them. check_status clears it.
            with contextlib.suppress(RuntimeError):
                runtime.check_status(status)
        elif status != _REACHED:
            self.event.synchronize()  # it raises the error of the device
        return bool(status == _REACHED)

    def Wait(self) -> None:  # noqa: N802
        """Wait until the device has reached the mark. Unlike CUDA's own wait, it yields the core meanwhile."""
        while not self.Test():
            os.sched_yield()


def ready(x: Array) -> Mark:
    """Return a mark behind the work that the program has queued on the device of ``x``, in the current stream."""
    cuda = cupy().cuda
    with cuda.Device(x.device.id):  # type: ignore[attr-defined] # all default streams have one address
        return marked(cuda.get_current_stream())


def hold(x: Array, reached: Mark) -> None:
    cuda = cupy().cuda
    with cuda.Device(x.device.id):  # type: ignore[attr-defined]
        follow(cuda.get_current_stream(), reached)


def side(role: str, x: Array) -> Any:
    """Return a stream for ``role``, independent of the default stream."""
    number = x.device.id  # type: ignore[attr-defined]
    made = _sides.get((role, number))
    if made is None:
        cuda = cupy().cuda
        with cuda.Device(number):
            made = _sides[role, number] = cuda.Stream(non_blocking=True)
    return made


def marked(stream: Any) -> Mark:
    return Mark(stream.record(cupy().cuda.Event(disable_timing=True)))


def mark(stream: Any) -> Mark:
    with cupy().cuda.Device(stream.device_id):  # an event belongs to the current device
        return marked(stream)


def follow(stream: Any, reached: Mark) -> None:
    stream.wait_event(reached.event)


def after(role: str, x: Array) -> Any:
    """Return the `side` stream for ``role``, after making it wait for the work from which ``x`` comes."""
    stream = side(role, x)
    follow(stream, ready(x))
    return stream


def drop(role: str) -> None:
    """Forget the streams of a role. Work that is queued on them goes on."""
    for key in [key for key in _sides if key[0] == role]:
        del _sides[key]


@contextlib.contextmanager
def on(stream: Any) -> Iterator[None]:
    """Make a `side` stream and its device current."""
    with cupy().cuda.Device(stream.device_id), stream:
        yield


def under(stream: Any, steps: Generator[Any, None, Any]) -> Generator[Any, None, Any]:
    while True:
        with on(stream):
            try:
                awaited = next(steps)
            except StopIteration as end:
                return end.value
        yield awaited

"""``cupy.cuda`` of the fake device."""

from __future__ import annotations

from .._late import Event, ExternalStream, Stream, get_current_stream, synchronize_all  # noqa: F401 - CuPy's names
from .._memory import MemoryPointer, UnownedMemory, alloc_pinned_memory  # noqa: F401
from . import runtime


class Device:
    """A device by its number."""

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(self._before.pop())

    def use(self) -> None:
        """Make it the current device."""
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        """Do all work."""
        runtime.deviceSynchronize()

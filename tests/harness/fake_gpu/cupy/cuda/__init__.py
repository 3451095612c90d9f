"""``cupy.cuda`` of the fake device."""

from __future__ import annotations

from .._late import Event, ExternalStream, Stream, get_current_stream, synchronize_all
from .._memory import BaseMemory, MemoryPointer, UnownedMemory, alloc_pinned_memory
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

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def use(self) -> None:
        """Make it the current device."""
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        """Do all work."""
        runtime.deviceSynchronize()


def is_available() -> bool:
    """Say that there is a device."""
    return True


__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "MemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc_pinned_memory",
    "get_current_stream",
    "is_available",
    "runtime",
    "synchronize_all",
]

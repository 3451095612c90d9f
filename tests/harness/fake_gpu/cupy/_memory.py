"""Memory of the fake device, which is memory of the host: pooled and pinned.

Memory that is freed into the pool is overwritten in the order of its stream, as the next owner would do: work of other
streams that still needs it comes out wrong.
"""

import ctypes
import weakref
from typing import Any

from . import _late

PINNED: dict[int, int] = {}
"""Pinned host memory: where it begins and ends."""
_HOLES = b"\xa5"


class BaseMemory:
    """Memory on the device."""

    def __init__(self, ptr: int, size: int, device_id: int = -1) -> None:
        self.ptr, self.size = ptr, size
        self.device_id = _late._runtime().getDevice() if device_id < 0 else device_id


_pooled = 0


def pooled_bytes() -> int:
    """Return how much has ever been taken from the pool."""
    return _pooled


class Pooled(BaseMemory):
    """Memory of the pool, of the stream that was current."""

    def __init__(self, size: int) -> None:
        global _pooled
        _pooled += size
        self._buffer = ctypes.create_string_buffer(size or 1)
        super().__init__(ctypes.addressof(self._buffer), size)
        ctypes.memset(self.ptr, _HOLES[0], size)
        self._stream = _late.get_current_stream()

    def __del__(self) -> None:
        buffer, ptr, size = self._buffer, self.ptr, self.size
        with _late._lists:
            if _late._busy:
                _late.keep_until_idle(buffer)
                self._stream.put("run", lambda: ctypes.memset(ptr, _HOLES[0], size))


class UnownedMemory(BaseMemory):
    """Memory that somebody else owns."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        super().__init__(ptr, size, device_id)
        self._owner = owner


class MemoryPointer:
    """A place in memory, which it keeps."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self.device_id = mem.device_id


def alloc_pinned_memory(size: int) -> Any:
    """Return pinned host memory, an object with the buffer protocol."""

    class PinnedMemoryPointer(ctypes.c_char * max(size, 1)):  # type: ignore[misc]
        pass

    made = PinnedMemoryPointer()
    start = ctypes.addressof(made)
    PINNED[start] = start + size
    weakref.finalize(made, PINNED.pop, start, None).atexit = False
    return made


def is_pinned(pointer: int, size: int) -> bool:
    """Tell whether host memory can be copied without the host."""
    now = PINNED.copy()  # other threads pin memory and give it back meanwhile
    return any(start <= pointer and pointer + size <= end for start, end in now.items())

"""Memory of the fake device, which is memory of the host: pooled, plain, pinned, registered, and shared by handle.

What is freed into the pool is overwritten in the order of its stream, as the next owner would do: work of other streams
that still needs it comes out wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import weakref
from typing import Any

from . import _late

MALLOCED: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
"""Plain allocations by address."""
OPENED: dict[int, Opened] = {}
"""Other processes' allocations, mapped here, by address."""
HOARDED: list[int] = []
"""What the pool keeps that nobody uses, so that there is no plain memory left."""
VIOLATIONS: list[str] = []
"""What CUDA leaves undefined, and the program has done."""
PINNED: dict[int, int] = {}
"""Pinned and registered host memory: where it begins and ends."""
_HANDLE = struct.Struct("<qqqq32x")
_made = itertools.count()  # no two allocations have a handle in common, as on a device
_HOLES = b"\xa5"


class Opened:
    """Another process's allocation, mapped for the device that was current, as often as it was opened."""

    def __init__(self, handle: bytes, mapped: mmap.mmap) -> None:
        self.handle, self.mapped = handle, mapped
        self.device_id = _late._runtime().getDevice()
        self.count = 1

    def tell(self, mapped: bool) -> None:
        """Let the owner know whether it is mapped here: in the page behind the memory, with a byte for each process."""
        self.mapped[len(self.mapped) - mmap.PAGESIZE + os.getpid() % mmap.PAGESIZE] = mapped


def address_of(buffer: Any) -> int:
    """Return where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


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


class Memory(BaseMemory):
    """A plain allocation (cudaMalloc), whose handle other processes can open."""

    def __init__(self, size: int) -> None:
        if HOARDED:
            raise _late._runtime().CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self._file = os.memfd_create("fake-gpu")
        length = (-(-max(size, 1) // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        os.ftruncate(self._file, length)
        self._map = mmap.mmap(self._file, length)
        super().__init__(address_of(self._map), size)
        ctypes.memset(self.ptr, _HOLES[0], size)
        self.handle = _HANDLE.pack(os.getpid(), self._file, length, next(_made))
        MALLOCED[self.ptr] = self

    def __del__(self) -> None:
        if not hasattr(self, "_map"):
            return
        if any(self._map[len(self._map) - mmap.PAGESIZE :]):
            VIOLATIONS.append(f"{self.size} bytes were freed that another process had mapped")
        os.close(self._file)
        _late.keep_until_idle(self._map)


class UnownedMemory(BaseMemory):
    """Memory that somebody else owns."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        super().__init__(ptr, size, device_id)
        for start, opened in OPENED.items():
            if start <= ptr < start + len(opened.mapped) and opened.device_id != self.device_id:
                VIOLATIONS.append(f"memory mapped for device {opened.device_id} was used on device {self.device_id}")
        self._owner = owner


class MemoryPointer:
    """A place in memory, which it keeps."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self.device_id = mem.device_id


def ipc_get(pointer: int) -> bytes:
    """Return the handle of the allocation that begins at an address (cudaIpcGetMemHandle)."""
    for start, memory in list(MALLOCED.items()):
        if start <= pointer < start + memory.size:
            return memory.handle
    raise RuntimeError("cudaErrorInvalidValue: invalid argument")


def ipc_open(handle: bytes, flags: int = 1) -> int:
    """Map another process's allocation (cudaIpcOpenMemHandle); where it is mapped already, at the same address."""
    pid, file, length, _ = _HANDLE.unpack(handle)
    if pid == os.getpid():
        raise RuntimeError("cudaErrorDeviceUninitialized: invalid device context")  # as CUDA: not in its own process
    for start, opened in OPENED.items():
        if opened.handle == handle:
            opened.count += 1
            return start
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        mapped = mmap.mmap(descriptor, length)
        os.close(descriptor)
    except OSError as error:
        raise RuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from error
    start = address_of(mapped)
    OPENED[start] = Opened(handle, mapped)
    OPENED[start].tell(True)
    return start


def ipc_close(pointer: int) -> None:
    """Unmap another process's allocation (cudaIpcCloseMemHandle), when it is closed as often as it was opened."""
    opened = OPENED.get(pointer)
    if opened is None or opened.device_id != _late._runtime().getDevice():
        raise RuntimeError("cudaErrorInvalidValue: invalid argument")
    opened.count -= 1
    if not opened.count:
        opened.tell(False)
        _late.keep_until_idle(OPENED.pop(pointer).mapped)


def alloc_pinned_memory(size: int) -> Any:
    """Return pinned host memory, an object with the buffer protocol."""

    class PinnedMemoryPointer(ctypes.c_char * max(size, 1)):  # type: ignore[misc]
        pass

    made = PinnedMemoryPointer()
    start = ctypes.addressof(made)
    PINNED[start] = start + size
    weakref.finalize(made, PINNED.pop, start, None).atexit = False
    return made


def register(pointer: int, size: int, flags: int) -> None:
    """Pin memory of the host (cudaHostRegister)."""
    if pointer in PINNED:
        raise RuntimeError("cudaErrorHostMemoryAlreadyRegistered: part or all of the memory is registered already")
    PINNED[pointer] = pointer + size


def unregister(pointer: int) -> None:
    """Undo `register` (cudaHostUnregister)."""
    del PINNED[pointer]


def is_pinned(pointer: int, size: int) -> bool:
    """Tell whether host memory can be copied without the host."""
    now = PINNED.copy()  # other threads pin memory and give it back meanwhile
    return any(start <= pointer and pointer + size <= end for start, end in now.items())

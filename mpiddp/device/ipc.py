"""CUDA IPC: device memory that other processes map, from cudaMalloc.

A handle exports a whole allocation, parts of which CuPy's pool reuses while others map it.
"""

from __future__ import annotations

from mpiddp.typing import Array

from .namespace import cupy
from .place import at

GRANULE_BYTES = 1 << 21
_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class Memory:
    """Device memory outside of CuPy's pool, freed with the last array over it.

    RuntimeError if CuPy's pool cannot free enough.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes = max(-(-nbytes // GRANULE_BYTES), 1) * GRANULE_BYTES
        self.device = device
        with at(device):
            try:
                self._memory = cupy().cuda.Memory(self.nbytes)
            except RuntimeError:  # CuPy's CUDARuntimeError
                cupy().get_default_memory_pool().free_all_blocks()
                self._memory = cupy().cuda.Memory(self.nbytes)
        self.start = int(self._memory.ptr)

    def handle(self) -> bytes:
        """Return 64 bytes by which another process opens it; RuntimeError where impossible."""
        with at(self.device):
            return bytes(cupy().cuda.runtime.ipcGetMemHandle(self.start))


HANDLE_BYTES = 64


def open_handle(handle: bytes, device: int) -> int:
    """Map another process's memory; RuntimeError where impossible."""
    with at(device):
        return int(cupy().cuda.runtime.ipcOpenMemHandle(handle))


def close_handle(start: int, device: int) -> None:
    with at(device):
        cupy().cuda.runtime.ipcCloseMemHandle(start)


def array(start: int, nbytes: int, owner: object, device: int) -> Array:
    """Return bytes of a device over its own, a peer's or registered host memory; they keep ``owner``."""
    memory = cupy().cuda.UnownedMemory(start, nbytes, owner, device)
    made: Array = cupy().ndarray((nbytes,), dtype="uint8", memptr=cupy().cuda.MemoryPointer(memory, 0))
    return made


def address(x: Array) -> int:
    return int(x.data.ptr)  # type: ignore[attr-defined]


def reads_host_memory(device: int) -> bool:
    """Return True if kernels may use registered host memory at the host's addresses."""
    return bool(cupy().cuda.runtime.deviceGetAttribute(_HOST_POINTERS, device))


def settle(device: int) -> None:
    """Call where memory changes hands, never in a step."""
    with at(device):
        cupy().cuda.runtime.deviceSynchronize()

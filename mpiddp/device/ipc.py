"""CUDA IPC: device memory that other processes map, from cudaMalloc and not from CuPy's pool.

A handle exports a whole allocation, 2 MiB at least, of which the pool hands out parts and which it reuses while others
map it.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpiddp.typing import Array

from .place import at

GRANULE_BYTES = 1 << 21
_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


def _cuda() -> Any:
    return importlib.import_module("cupy").cuda


class Memory:
    """Device memory outside of CuPy's pool, freed with the last array over it.

    Parameters
    ----------
    nbytes : int
        Rounded up to `GRANULE_BYTES`.
    device : int
        Number of the device, not necessarily current.

    Raises
    ------
    RuntimeError
        Not enough memory, even after CuPy's pool has freed its unused blocks.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes = max(-(-nbytes // GRANULE_BYTES), 1) * GRANULE_BYTES
        self.device = device
        with at(device):
            try:
                self._memory = _cuda().Memory(self.nbytes)
            except RuntimeError:  # CuPy's CUDARuntimeError
                importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()
                self._memory = _cuda().Memory(self.nbytes)
        self.start = int(self._memory.ptr)

    def handle(self) -> bytes:
        """Return the 64 bytes by which another process opens it; RuntimeError where impossible."""
        with at(self.device):
            return bytes(_cuda().runtime.ipcGetMemHandle(self.start))


HANDLE_BYTES = 64


def open_handle(handle: bytes, device: int) -> int:
    """Map another process's memory for a device; return its address here, RuntimeError where impossible."""
    with at(device):
        return int(_cuda().runtime.ipcOpenMemHandle(handle))


def close_handle(start: int, device: int) -> None:
    """Unmap memory of `open_handle`."""
    with at(device):
        _cuda().runtime.ipcCloseMemHandle(start)


def array(start: int, nbytes: int, owner: object, device: int) -> Array:
    """Return memory of the device, of a peer or of the host (registered) as bytes of a device; they keep ``owner``."""
    cuda, cupy = _cuda(), importlib.import_module("cupy")
    memory = cuda.UnownedMemory(start, nbytes, owner, device)
    made: Array = cupy.ndarray((nbytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))
    return made


def address(x: Array) -> int:
    """Return the address of an array on a device."""
    return int(x.data.ptr)  # type: ignore[attr-defined]


def reads_host_memory(device: int) -> bool:
    """Return True if kernels may use registered host memory at the host's addresses."""
    return bool(_cuda().runtime.deviceGetAttribute(_HOST_POINTERS, device))


def settle(device: int) -> None:
    """Synchronise a device: where memory changes hands, never in a step."""
    with at(device):
        _cuda().runtime.deviceSynchronize()

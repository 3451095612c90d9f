"""Device memory that other processes map: CUDA IPC, and host memory at which kernels may point.

CuPy's pool hands out parts of larger allocations, whose handle would export all that lies beside them, and takes memory
back while others may still map it. So this memory comes from cudaMalloc, in whole multiples of the 2 MiB that a handle
exports at least, and its owner says when it ends.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpiddp.typing import Array

GRANULE_BYTES = 1 << 21
_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


def _cuda() -> Any:
    return importlib.import_module("cupy").cuda


class Memory:
    """Memory of the current device, outside of the pool; freed when the last array over it is gone.

    Parameters
    ----------
    nbytes : int
        At least; rounded up to `GRANULE_BYTES`.

    Raises
    ------
    MemoryError
        If the device has not so much.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(-(-nbytes // GRANULE_BYTES), 1) * GRANULE_BYTES
        try:
            self._memory = _cuda().Memory(self.nbytes)
        except RuntimeError as error:  # CuPy's CUDARuntimeError
            raise MemoryError(str(error)) from error
        self.start = int(self._memory.ptr)
        """Address of its first byte."""

    def handle(self) -> bytes:
        """Return what another process opens it by, 64 bytes; RuntimeError where that is not possible."""
        return bytes(_cuda().runtime.ipcGetMemHandle(self.start))


HANDLE_BYTES = 64


def open_handle(handle: bytes) -> int:
    """Map another process's memory and return its address here; RuntimeError where that is not possible."""
    return int(_cuda().runtime.ipcOpenMemHandle(handle))


def close_handle(start: int) -> None:
    """Unmap what `open_handle` has mapped."""
    _cuda().runtime.ipcCloseMemHandle(start)


def array(start: int, nbytes: int, owner: object) -> Array:
    """Return memory at an address as an array of bytes of the current device, which keeps ``owner``.

    The address may be that of a peer's memory or of registered memory of the host: kernels of this device see both.
    """
    cuda, cupy = _cuda(), importlib.import_module("cupy")
    memory = cuda.UnownedMemory(start, nbytes, owner, cuda.runtime.getDevice())
    made: Array = cupy.ndarray((nbytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))
    return made


def address(x: Array) -> int:
    """Return where an array on a device begins."""
    return int(x.data.ptr)  # type: ignore[attr-defined]


def reads_host_memory() -> bool:
    """Tell whether kernels of the current device may use registered host memory at the host's own addresses."""
    runtime = _cuda().runtime
    return bool(runtime.deviceGetAttribute(_HOST_POINTERS, runtime.getDevice()))


def settle() -> None:
    """Wait for everything that the current device has been given: where memory changes hands, never in a step."""
    _cuda().runtime.deviceSynchronize()

# ruff: noqa: N802, N816 - CUDA's names
"""``cupy.cuda.runtime`` of the fake device: the calls that mpiddp makes, by CUDA's names."""

import ctypes
import os
import threading

from .. import _late, _memory

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)

COUNT = 2
"""Devices that a process sees."""
synchronised = 0
"""How often a whole device was synchronised."""
failed = 0
"""The number of an error that every call returns that waits, as after a kernel's invalid access."""


class _Thread(threading.local):
    """The device that is current in a thread, the first at first; and its last error that nobody has asked for."""

    device = last_error = 0


_thread = _Thread()


class CUDARuntimeError(RuntimeError):
    """An error that CUDA answers."""


def getDeviceCount() -> int:
    """Return how many devices there are."""
    return COUNT


def getDevice() -> int:
    """Return the number of the current device."""
    return _thread.device


def setDevice(device: int) -> None:
    """Make a device current."""
    if not 0 <= device < COUNT:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    _thread.device = device


def getDeviceProperties(device: int) -> dict[str, object]:
    """Return what is known of a device; ``FAKE_GPU_UUID`` makes that of a process its own.

    CuPy cuts a UUID off at its first zero byte, and here that comes early.
    """
    name = os.environ.get("FAKE_GPU_UUID", "0")
    return {"name": b"fake", "uuid": f"fake-{name}".encode(), "major": 9, "minor": 0}


def deviceGetPCIBusId(device: int) -> str:
    """Return a device's place on the bus."""
    return f"0000:{device:02x}:00.0"


def hostRegister(address: int, size_bytes: int, flags: int) -> None:
    """Pin memory that is there already."""
    if address in _memory.PINNED:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    _memory.PINNED[address] = address + size_bytes


def hostUnregister(address: int) -> None:
    """Undo `hostRegister`."""
    del _memory.PINNED[address]


def eventQuery(event: int) -> int:
    """Return cudaSuccess if an event has been reached, else cudaErrorNotReady; what has failed, if something has."""
    status = failed or (0 if _late.event_at(event).done else 600)
    _thread.last_error = status or _thread.last_error
    return status


def check_status(status: int) -> None:
    """Raise an error; forget the last one."""
    if status:
        _thread.last_error = 0
        raise CUDARuntimeError(f"error {status}")


def expect_no_error() -> None:
    """Stand for CUB, which takes the last error for its own kernel's."""
    assert not _thread.last_error, f"error {_thread.last_error} would end a sum between two kernels"


def deviceSynchronize() -> None:
    """Do all work."""
    global synchronised
    synchronised += 1
    _late.synchronize_all()


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """Queue a copy; from and to host memory that is pinned, or it would not be asynchronous."""
    if kind == memcpyDeviceToHost:
        assert _memory.is_pinned(dst, size), "a copy to host memory that is not pinned blocks"
    if kind == memcpyHostToDevice:
        assert _memory.is_pinned(src, size), "a copy from host memory that is not pinned blocks"
    _late.stream_at(stream).put("run", lambda: ctypes.memmove(dst, src, size))

"""Transfers between the host and the current device, and asynchronous copies of contiguous arrays."""

from typing import Any

import numpy as np

from mpiddp.typing import Array

from .choice import cuda_fault, current_device
from .namespace import cupy, is_device_array


def upload(x: Array) -> Array:
    """Return a copy of a host array on the current device.

    A device array is returned as it is, and so is every array if no GPU is usable. The host may write to ``x`` after
    the call, unless ``x`` is in pinned memory, from which CuPy copies asynchronously.
    """
    if is_device_array(x) or cuda_fault() is not None:
        return x
    with cupy().cuda.Device(current_device()):  # each thread has a current device of its own
        return cupy().asarray(x)  # type: ignore[no-any-return]


def download(x: Array) -> np.ndarray[Any, Any]:
    """Return a finished copy of a device array on the host. A host array is returned as it is."""
    return x.get() if is_device_array(x) else x  # type: ignore[attr-defined]


def placed(value: Any, like: Array) -> Array:
    """Return ``value`` as a host array if ``like`` is one. Otherwise return it as an array on a device.

    In the second case a value of the host is copied to the current device.
    """
    if is_device_array(like):
        return cupy().asarray(value)  # type: ignore[no-any-return]
    return np.asarray(download(value))


def synchronize() -> None:
    """Wait for all work of the current device (``torch.cuda.synchronize``)."""
    cupy().cuda.Device().synchronize()


def _copy(target: int, source: int, nbytes: int, kind: str, stream: Any) -> None:
    if nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, f"memcpy{kind}"), stream.ptr)


def down(host: Array, x: Array, stream: Any) -> None:
    """Copy a device array to ``host``, pinned memory that is at least as long."""
    _copy(host.ctypes.data, x.data.ptr, x.nbytes, "DeviceToHost", stream)  # type: ignore[attr-defined]


def up(x: Array, host: Array, stream: Any) -> None:
    _copy(x.data.ptr, host.ctypes.data, x.nbytes, "HostToDevice", stream)  # type: ignore[attr-defined]


def across(target: Array, source: Array, stream: Any) -> None:
    """Copy between arrays on one device, or between two devices."""
    _copy(target.data.ptr, source.data.ptr, source.nbytes, "Default", stream)  # type: ignore[attr-defined]

"""Asynchronous copies of contiguous arrays between device and host."""

from __future__ import annotations

from typing import Any

from mpiddp.typing import Array

from .namespace import cupy


def _copy(target: int, source: int, nbytes: int, kind: str, stream: Any) -> None:
    if nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, f"memcpy{kind}"), stream.ptr)


def down(host: Array, x: Array, stream: Any) -> None:
    """Copy to pinned memory, at least as long."""
    _copy(host.ctypes.data, x.data.ptr, x.nbytes, "DeviceToHost", stream)  # type: ignore[attr-defined]


def up(x: Array, host: Array, stream: Any) -> None:
    _copy(x.data.ptr, host.ctypes.data, x.nbytes, "HostToDevice", stream)  # type: ignore[attr-defined]


def across(target: Array, source: Array, stream: Any) -> None:
    """Copy between device memory, a peer's included, and registered host memory."""
    _copy(target.data.ptr, source.data.ptr, source.nbytes, "Default", stream)  # type: ignore[attr-defined]

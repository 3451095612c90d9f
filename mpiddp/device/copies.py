"""Copies between device and host that a stream makes while the host goes on."""

from __future__ import annotations

import importlib
from typing import Any

from mpiddp.typing import Array


def _copy(target: int, source: int, nbytes: int, kind: str, stream: Any) -> None:
    if nbytes:
        runtime = importlib.import_module("cupy").cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, f"memcpy{kind}"), stream.ptr)


def down(host: Array, x: Array, stream: Any) -> None:
    """Copy the bytes of ``x``, contiguous and on a device, to pinned memory at least as long."""
    _copy(host.ctypes.data, x.data.ptr, x.nbytes, "DeviceToHost", stream)  # type: ignore[attr-defined]


def up(x: Array, host: Array, stream: Any) -> None:
    """Copy pinned memory to the bytes of ``x``, contiguous and on a device; as many as ``x`` has."""
    _copy(x.data.ptr, host.ctypes.data, x.nbytes, "HostToDevice", stream)  # type: ignore[attr-defined]


def across(target: Array, source: Array, stream: Any) -> None:
    """Copy bytes between contiguous arrays; each may be memory of a peer, or of the host that kernels can use."""
    _copy(target.data.ptr, source.data.ptr, source.nbytes, "Default", stream)  # type: ignore[attr-defined]

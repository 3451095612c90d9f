"""Devices: NumPy or CuPy, streams, copies and kernels. The only importer of cupy, and only when it is used."""

from . import choice, dlpack, ipc, kernels, nccl, pinned, stream, transfer
from .choice import cuda_fault, current_device, device_count, in_use, set_device
from .namespace import array_namespace, empty, is_device_array
from .transfer import download, placed, synchronize, upload


def forget() -> None:
    """Forget all about devices, for tests."""
    choice.forget()
    stream.forget()
    pinned.forget()
    kernels.forget()
    nccl.forget()


__all__ = [
    "array_namespace",
    "cuda_fault",
    "current_device",
    "device_count",
    "dlpack",
    "download",
    "empty",
    "forget",
    "in_use",
    "ipc",
    "is_device_array",
    "kernels",
    "nccl",
    "pinned",
    "placed",
    "set_device",
    "stream",
    "synchronize",
    "transfer",
    "upload",
]

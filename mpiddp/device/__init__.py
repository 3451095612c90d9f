"""Where arrays are: NumPy's on the host, CuPy's on a GPU; streams, and copies between them.

Only this package imports cupy, and only when a GPU is used.
"""

from . import choice, dlpack, nccl, pinned, stream, transfer
from .choice import cuda_fault, current_device, device_count, in_use, set_device
from .namespace import array_namespace, device_arrays_of, empty, is_device_array
from .transfer import download, placed, synchronize, upload


def forget() -> None:
    """Forget all about devices, for tests."""
    choice.forget()
    stream.forget()
    pinned.forget()
    nccl.forget()


__all__ = [
    "array_namespace",
    "cuda_fault",
    "current_device",
    "device_arrays_of",
    "device_count",
    "dlpack",
    "download",
    "empty",
    "forget",
    "in_use",
    "is_device_array",
    "nccl",
    "pinned",
    "placed",
    "set_device",
    "stream",
    "synchronize",
    "transfer",
    "upload",
]

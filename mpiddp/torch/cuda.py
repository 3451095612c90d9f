"""CUDA tensors as CuPy arrays, without a copy, for mpiddp's own GPU paths.

While a call submits its operation, CuPy's current stream is torch's, so that kernels which torch has queued come first.
An operation ends when the device has done its work, so nothing has to be ordered after it.
"""

import contextlib

import torch

from mpiddp import device
from mpiddp.device.namespace import cupy
from mpiddp.device.place import at


def on_stream(place: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make torch's current stream of a device the current one of CuPy, and the device the current device."""
    return at(place.index, cupy().cuda.ExternalStream(torch.cuda.current_stream(place).cuda_stream, place.index))


def chosen() -> int | None:
    """Return the number of the GPU that the program has chosen, or None: it uses none, or CuPy is missing.

    A program chooses before the process group is made (``torch.cuda.set_device``). When the group is made, mpiddp asks
    MPI if it takes device pointers, and the other ranks which GPUs they use.
    """
    if torch.cuda.is_initialized() and device.cuda_fault() is None:
        return int(torch.cuda.current_device())
    return None

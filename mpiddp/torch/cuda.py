"""Calls with CUDA tensors, which mpiddp's GPU algorithms take as CuPy arrays without a copy.

While a call submits its operation, CuPy's current stream is torch's, so that kernels which torch has queued run first.
An operation ends only when the GPU has finished its work, so torch's later kernels need not wait for it.
"""

import contextlib

import torch

from mpiddp import device
from mpiddp.device.namespace import cupy
from mpiddp.device.place import at


def on_stream(place: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``place`` is the current device, and torch's current stream is CuPy's, too."""
    return at(place.index, cupy().cuda.ExternalStream(torch.cuda.current_stream(place).cuda_stream, place.index))


def chosen() -> int | None:
    """Return the number of the GPU that the program has chosen; None if it uses no GPU, or CuPy cannot be used.

    A program chooses its GPU by ``torch.cuda.set_device`` before it makes the process group. While the group is made,
    mpiddp asks MPI if it takes device pointers, and asks the other ranks which GPUs they use.
    """
    if torch.cuda.is_initialized() and device.cuda_fault() is None:
        return int(torch.cuda.current_device())
    return None

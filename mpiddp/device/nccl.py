"""NCCL through ``cupy.cuda.nccl``: collectives between GPUs, on a stream."""

import functools
import importlib
import warnings
from typing import Any

import numpy as np

from mpiddp.typing import Array

from .choice import cuda_fault
from .place import here

_KINDS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_OPERATIONS = {"SUM": "SUM", "AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}


def _nccl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `fault` reports a library that cannot be loaded
        return importlib.import_module("cupy.cuda.nccl")


@functools.cache
def fault() -> str | None:
    """Return the reason why NCCL cannot be used, or None."""
    text = cuda_fault()
    if text is None and not _nccl().available:
        text = "CuPy cannot load the NCCL library: pip install nvidia-nccl-cu12, or -cu13, whichever CUDA CuPy is for"
    return text


def unique_id() -> Any:
    """Return the number of a new communicator, which one rank makes and all ranks need."""
    return _nccl().get_unique_id()


def reduces(dtype: np.dtype[Any], name: str) -> bool:
    """Return True if NCCL's reduction gives mpiddp's result. NCCL's MIN and MAX of floats do not: they lose a NaN."""
    extreme = name in ("MIN", "MAX")
    return dtype.name in _KINDS and name in _OPERATIONS and not (extreme and dtype.kind not in "iu")


class Communicator:
    """A communicator of NCCL.

    All ranks make and destroy it together, each with its GPU current. ``number`` is the `unique_id` of one rank. Each
    `call` queues a kernel on a stream, and all ranks make their calls in the same order.
    """

    def __init__(self, size: int, number: Any, rank: int) -> None:
        self.device = here()
        self._nccl = _nccl()
        self._comm = self._nccl.NcclCommunicator(size, number, rank)

    def call(self, function: str, x: Array, output: Array, stream: Any, reduction: str = "", *root: int) -> None:
        """Queue the kernel of NCCL's ``function`` on ``stream``.

        The kernel works on the length of the shorter array, in elements for a reduction and in bytes otherwise. For AVG
        it computes the sum, which the caller has to divide.
        """
        if reduction:
            count, names = min(x.size, output.size), [x.dtype.name.upper(), _OPERATIONS[reduction]]
        else:
            count, names = min(x.nbytes, output.nbytes), ["UINT8"]
        pointers = (int(each.data.ptr) for each in (x, output))  # type: ignore[attr-defined]
        kinds = (int(getattr(self._nccl, f"NCCL_{name}")) for name in names)
        getattr(self._comm, function)(*pointers, count, *kinds, *root, stream.ptr)

    def destroy(self) -> None:
        """Destroy the communicator. All ranks call this, when no kernel is pending."""
        self._comm.destroy()

    def abort(self) -> None:
        """End the pending kernels, on this rank alone."""
        self._comm.abort()

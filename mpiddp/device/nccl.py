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
        warnings.simplefilter("ignore")  # `fault` tells
        return importlib.import_module("cupy.cuda.nccl")


@functools.cache
def fault() -> str | None:
    """Return why NCCL cannot be used."""
    text = cuda_fault()
    if text is None and not _nccl().available:
        text = "CuPy cannot load the NCCL library: pip install nvidia-nccl-cu12, or -cu13, whichever CUDA CuPy is for"
    return text


def unique_id() -> Any:
    """Return the number of a new communicator, which one rank makes and all ranks need."""
    return _nccl().get_unique_id()


def reduces(dtype: np.dtype[Any], name: str) -> bool:
    """Return True if NCCL's reduction is mpiddp's: its MIN and MAX lose a NaN."""
    extreme = name in ("MIN", "MAX")
    return dtype.name in _KINDS and name in _OPERATIONS and not (extreme and dtype.kind not in "iu")


class Communicator:
    """NCCL's communicator, made and destroyed by all ranks together, each with its GPU current.

    Calls queue a kernel on ``stream``, in one order on all ranks. ``number`` is one rank's `unique_id`.
    """

    def __init__(self, size: int, number: Any, rank: int) -> None:
        self.device = here()
        self._nccl = _nccl()
        self._comm = self._nccl.NcclCommunicator(size, number, rank)

    def broadcast(self, x: Array, root: int, stream: Any) -> None:
        pointer = _pointer(x)
        self._comm.broadcast(pointer, pointer, x.nbytes, self._nccl.NCCL_UINT8, root, stream.ptr)

    def all_gather(self, output: Array, x: Array, stream: Any) -> None:
        self._comm.allGather(_pointer(x), _pointer(output), x.nbytes, self._nccl.NCCL_UINT8, stream.ptr)

    def all_reduce(self, x: Array, name: str, stream: Any) -> None:
        """Reduce ``x`` in place; an average is a sum here."""
        pointer = _pointer(x)
        self._comm.allReduce(pointer, pointer, x.size, self._kind(x), self._operation(name), stream.ptr)

    def reduce(self, output: Array | None, x: Array, name: str, root: int, stream: Any) -> None:
        target = 0 if output is None else _pointer(output)
        self._comm.reduce(_pointer(x), target, x.size, self._kind(x), self._operation(name), root, stream.ptr)

    def reduce_scatter(self, output: Array, x: Array, name: str, stream: Any) -> None:
        ends = _pointer(x), _pointer(output)
        self._comm.reduceScatter(*ends, output.size, self._kind(x), self._operation(name), stream.ptr)

    def destroy(self) -> None:
        """Call on all ranks, with nothing pending."""
        self._comm.destroy()

    def abort(self) -> None:
        """End the pending kernels, on this rank alone."""
        self._comm.abort()

    def _kind(self, x: Array) -> int:
        return int(getattr(self._nccl, f"NCCL_{x.dtype.name.upper()}"))

    def _operation(self, name: str) -> int:
        return int(getattr(self._nccl, f"NCCL_{_OPERATIONS[name]}"))


def _pointer(x: Array) -> int:
    return int(x.data.ptr)  # type: ignore[attr-defined]

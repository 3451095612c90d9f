"""Tensors as arrays: without a copy if a tensor is contiguous and NumPy or CuPy can view it, else through a copy.

NumPy lacks some of torch's dtypes. For reductions of bfloat16, ml_dtypes adds that dtype to NumPy. Calls that do not
reduce send tensors of all these dtypes as bytes.
"""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mpiddp import distributed
from mpiddp.device import array_namespace, cuda_fault, namespace
from mpiddp.device.half import bfloat16
from mpiddp.distributed.groups import GroupLike
from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

from .errors import RAISED, ArgumentError, translate

_NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


_kept: "list[Loan]" = []


def _over(tensor: torch.Tensor) -> Array:
    """Return an array over the memory of a tensor. The array keeps the tensor alive.

    ``Tensor.numpy`` is not called, because after that a tensor could never be resized.
    """
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), False),
        "typestr": _NUMPY[tensor.dtype].str,
        "shape": tuple(tensor.shape),
        "strides": None if tensor.is_contiguous() else strides,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor in host memory as an array of the same shape and strides, without a copy."""
    if tensor.dtype == torch.bfloat16:
        return _over(tensor.detach().view(torch.int16)).view(bfloat16())
    return _over(tensor)


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor, without a copy."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Loan:
    """The tensors of one call, lent to mpiddp as flat arrays.

    If a tensor cannot be viewed as a flat array, a copy of it is lent, and `give_back` copies the result into the
    tensor. The loan keeps the tensors alive, because the arrays do not.

    Parameters
    ----------
    moved : bool, default False
        True if the call moves data and does not reduce. Tensors of dtypes that NumPy lacks are then lent as bytes.

    Attributes
    ----------
    device : torch.device or None
        The device of the arrays if they are CuPy's. `Operations` then makes the call under `cuda.on_stream`.
    """

    device: torch.device | None = None
    _copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    _divides = False

    def __init__(self, moved: bool = False) -> None:
        self._moved = moved
        self._lent: list[torch.Tensor] = []

    def divide(self, sums: Array, divisor: int, work: distributed.Work) -> None:
        """Divide integer sums by ``divisor`` as soon as ``work`` ends, so that no later call reads undivided sums.

        Quotients are rounded towards zero, as NCCL does.
        """

        def end(_: object) -> None:
            if work.exception() is None:
                xp = array_namespace(sums)
                xp.subtract(sums, xp.fmod(sums, divisor), out=sums)  # fmod's result has the sign of the sum
                xp.floor_divide(sums, divisor, out=sums)

        self._divides = True
        work.get_future().add_done_callback(end)

    def input(self, tensor: torch.Tensor) -> Array:
        """Return the array of a tensor that the call only reads."""
        x = self.memory(tensor)
        return self._view(self._usable(tensor)) if x is None else x

    def output(self, tensor: torch.Tensor) -> Array:
        """Return the array of a tensor that the call writes, and may read before."""
        if (x := self.memory(tensor)) is not None:
            return x
        lent = self._usable(tensor)
        if lent.data_ptr() != tensor.data_ptr() or lent.device != tensor.device:
            self._copies = [*self._copies, (tensor, lent)]
        return self._view(lent)

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Return the arrays of several tensors that a call reads and writes.

        If tensors overlap in memory, copies are lent, so that all tensors are read before one is written.
        """
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
        if all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)):
            return [self.output(each) for each in tensors]
        copies = [each.detach().clone() for each in tensors]
        arrays = [self.output(each) for each in copies]
        self._copies = [*self._copies, *zip(tensors, copies, strict=True)]
        return arrays

    def give_back(self) -> None:
        """Copy results from lent copies into the caller's tensors, and release the tensors."""
        if self._divides:
            with requests.lock:  # another thread that ended the work may still be dividing
                pass
        for tensor, lent in self._copies:
            tensor.detach().copy_(lent)
            if lent.is_cuda:  # this stream may differ from the stream on which the copy was made
                lent.record_stream(torch.cuda.current_stream(lent.device))
        self._copies = ()
        self._lent.clear()

    def fail(self, error: BaseException) -> None:
        """Keep the tensors of a call that failed, because a message may still arrive in them.

        If ``error`` is mpiddp's, raise torch's error for it.
        """
        self.keep()
        if isinstance(error, RAISED):
            raise translate(error) from error

    def keep(self) -> None:
        """Keep the tensors alive until the program ends."""
        _kept.append(self)

    def memory(self, tensor: torch.Tensor) -> Array | None:
        """Return an array over a tensor's memory if the tensor is contiguous and on the host, else None.

        All calls use this fast way (1 us) first.
        """
        if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg() or tensor.is_conj():
            return None
        dtype = _NUMPY.get(tensor.dtype) or self._dtype(tensor)
        address, length = _expect_memory(tensor), tensor.nbytes
        self._lent.append(tensor)
        memory: Any = MPI.buffer.fromaddress(address, length)
        return np.frombuffer(memory, dtype)

    def _dtype(self, tensor: torch.Tensor) -> np.dtype[Any]:
        """Return the dtype of an array for a tensor whose dtype NumPy lacks."""
        if self._moved:
            return _NUMPY[torch.uint8]
        if tensor.dtype == torch.bfloat16:
            return bfloat16()
        raise ArgumentError(f"there is no reduction of {tensor.dtype}: convert it, such as by tensor.float()")

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy that is contiguous and in memory that NumPy or CuPy can view."""
        found = tensor.detach()
        if found.layout is not torch.strided:
            raise ArgumentError(
                f"this operation takes dense tensors, got one of layout {found.layout}; pass tensor.to_dense()"
            )
        if not (found.is_cpu or (found.is_cuda and cuda_fault() is None)):
            found = found.cpu()
        return found.resolve_conj().resolve_neg().contiguous()

    def _view(self, lent: torch.Tensor) -> Array:
        x = self.memory(lent)
        if x is not None:
            return x
        self.device = lent.device
        _expect_memory(lent)
        dtype = _NUMPY.get(lent.dtype) or self._dtype(lent)
        return namespace.over(lent.data_ptr(), lent.nbytes, dtype, lent.device.index, lent)


def _expect_memory(tensor: torch.Tensor) -> int:
    """Return a tensor's address; ArgumentError if it has none."""
    address = tensor.data_ptr()
    if tensor.nbytes and not address:
        raise ArgumentError(f"a tensor of {tensor.nbytes} bytes has no memory: its storage was made shorter by resize_")
    return address


def symmetric_empty(
    shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, group: GroupLike = None
) -> torch.Tensor:
    """Return an uninitialised tensor in memory that the ranks of the node share; all ranks of the group call this.

    The tensor is in host memory. Collectives reduce the tensor, and contiguous views of it, in place.
    """
    sizes = shape if isinstance(shape, tuple) else (shape,)
    memory = distributed.symmetric_empty(math.prod(sizes) * dtype.itemsize, "uint8", group)
    if memory is None:
        raise ValueError("symmetric_empty: this rank is not a member of the group")
    return torch.from_numpy(memory).view(dtype).view(sizes)

"""Tensors as arrays: without a copy where a tensor is contiguous and in the host's memory, else through a copy.

ml_dtypes gives NumPy bfloat16 for reductions; data that only moves goes as bytes where NumPy lacks the dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpiddp.device import array_namespace
from mpiddp.device.half import bfloat16
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

from . import cuda
from .errors import ArgumentError

_NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


_kept: list[Loan] = []


class _Memory:
    """A tensor's memory for NumPy, whose array keeps the tensor; after ``Tensor.numpy`` it could never be resized."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": _NUMPY[tensor.dtype].str,
            "shape": tuple(tensor.shape),
            "strides": None
            if tensor.is_contiguous()
            else tuple(stride * tensor.itemsize for stride in tensor.stride()),
        }


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of the host's memory as an array of its shape and strides, without a copy."""
    if tensor.dtype == torch.bfloat16:
        return np.asarray(_Memory(tensor.detach().view(torch.int16))).view(bfloat16())
    return np.asarray(_Memory(tensor))


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor, without a copy."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Loan:
    """Tensors lent to one call as flat arrays; those that need a copy are copied back by `give_back`.

    The host's arrays keep no tensor: the loan does. ``device``: None, or where the arrays are CuPy's; the call is then
    made under `cuda.on_stream`.
    """

    __slots__ = ("_copies", "_lent", "_sums", "device")

    def __init__(self) -> None:
        self._lent: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[tuple[Array, int]] = []
        self.device: torch.device | None = None

    def divide(self, sums: Array, divisor: int) -> None:
        """Let `give_back` divide integers, towards zero as NCCL does."""
        self._sums.append((sums, divisor))

    def input(self, tensor: torch.Tensor, *, moved: bool = False) -> Array:
        """Return the array of a tensor that is read only; ``moved``: its bytes will do."""
        x = self._plain(tensor)
        return self._flat(self._usable(tensor), moved) if x is None else x

    def output(self, tensor: torch.Tensor, *, moved: bool = False, also: Sequence[torch.Tensor] = ()) -> Array:
        """Return the array of a tensor that is written to, and may be read before; ``moved``: its bytes will do.

        What is written goes to the tensors of ``also``, too.
        """
        if not also and (x := self._plain(tensor)) is not None:
            return x
        lent = self._usable(tensor)
        if lent.data_ptr() != tensor.data_ptr() or lent.device != tensor.device:
            self._copies.append((tensor, lent))
        self._copies += [(each, lent) for each in also]
        return self._flat(lent, moved)

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Return the arrays of tensors that are read before any is written to: copies if they overlap."""
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
        if all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)):
            return [self.output(each) for each in tensors]
        return [self.output(each.detach().clone(), also=(each,)) for each in tensors]

    def give_back(self) -> None:
        """Divide sums, and copy results to where they belong."""
        for sums, divisor in self._sums:
            sums -= array_namespace(sums).fmod(sums, divisor)  # has the sign of the sum
            sums //= divisor
        self._sums.clear()
        for tensor, lent in self._copies:
            tensor.detach().copy_(lent)
            if lent.is_cuda:  # this stream may be another than that of the copy
                lent.record_stream(torch.cuda.current_stream(lent.device))
        self._copies.clear()
        self._lent.clear()

    def keep(self) -> None:
        """Keep the tensors of a call that has failed for good: something may still be on its way to them."""
        _kept.append(self)

    def _plain(self, tensor: torch.Tensor) -> Array | None:
        """Return the memory of a tensor that NumPy can view as it is: soon, for 8 bytes. Else return None."""
        dtype = _NUMPY.get(tensor.dtype)
        if dtype is None or not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg() or tensor.is_conj():
            return None
        address = tensor.data_ptr()
        if not address:
            return None
        self._lent.append(tensor)
        memory: Any = MPI.buffer.fromaddress(address, tensor.nbytes)
        return np.frombuffer(memory, dtype)

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy that is contiguous and in memory that NumPy or CuPy can view."""
        found = tensor.detach()
        if found.layout is not torch.strided:
            raise ArgumentError(
                f"this operation takes dense tensors, got one of layout {found.layout}; pass tensor.to_dense()"
            )
        if not found.is_cpu and not cuda.usable(found):
            found = found.cpu()
        return found.resolve_conj().resolve_neg().contiguous()

    def _flat(self, lent: torch.Tensor, moved: bool) -> Array:
        x = self._plain(lent)
        if x is not None:
            return x
        flat, dtype = lent.view(-1), None
        if lent.dtype not in _NUMPY and moved:
            flat = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have another stride
        elif lent.dtype == torch.bfloat16:
            flat, dtype = flat.view(torch.int16), bfloat16()
        elif lent.dtype not in _NUMPY:
            raise ArgumentError(f"there is no reduction of {lent.dtype}: convert it, such as by tensor.float()")
        if not lent.is_cpu:
            self.device = lent.device
        found: Array = as_array(flat) if lent.is_cpu else cuda.as_array(flat)
        return found if dtype is None else found.view(dtype)

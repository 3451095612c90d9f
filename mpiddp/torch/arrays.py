"""Tensors as arrays: without a copy where a tensor is contiguous and in the host's memory, else through a copy.

ml_dtypes gives NumPy bfloat16 for reductions; data that only moves goes as bytes where NumPy lacks the dtype.
"""

from __future__ import annotations

import numpy as np
import torch

from mpiddp.device import array_namespace
from mpiddp.device.half import bfloat16
from mpiddp.typing import Array

from . import cuda

_NUMPY = frozenset(
    (
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if NumPy can view the tensor's memory as it is."""
    return tensor.is_cpu and tensor.dtype in _NUMPY and tensor.is_contiguous() and not tensor.is_conj()


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of the host's memory as an array of its shape and strides, without a copy."""
    found = tensor.detach()
    if found.dtype == torch.bfloat16:
        return found.view(torch.int16).numpy().view(bfloat16())
    return found.numpy()


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor, without a copy."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Loan:
    """Tensors lent to one call as flat arrays; those that need a copy are copied back by `give_back`.

    ``device``: None, or where the arrays are CuPy's; the call is then made under `cuda.on_stream`.
    """

    __slots__ = ("_copies", "_sums", "device")

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[tuple[Array, int]] = []
        self.device: torch.device | None = None

    def divide(self, sums: Array, divisor: int) -> None:
        """Let `give_back` divide integers, towards zero as NCCL does."""
        self._sums.append((sums, divisor))

    def input(self, tensor: torch.Tensor, *, moved: bool = False) -> Array:
        """Return the array of a tensor that is read only; ``moved``: its bytes will do."""
        return self._flat(self._lent(tensor), moved)

    def output(self, tensor: torch.Tensor, *, moved: bool = False) -> Array:
        """Return the array of a tensor that is written to, and may be read before; ``moved``: its bytes will do."""
        lent = self._lent(tensor)
        if lent.data_ptr() != tensor.data_ptr() or lent.device != tensor.device:
            self._copies.append((tensor, lent))
        return self._flat(lent, moved)

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

    def _lent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy that is contiguous and in memory that NumPy or CuPy can view."""
        found = tensor.detach()
        if found.layout is not torch.strided:
            raise TypeError(
                f"this operation takes dense tensors, got one of layout {found.layout}; pass tensor.to_dense()"
            )
        if not found.is_cpu and not cuda.usable(found):
            found = found.cpu()
        return found.resolve_conj().resolve_neg().contiguous()

    def _flat(self, lent: torch.Tensor, moved: bool) -> Array:
        flat, dtype = lent.view(-1), None
        if lent.dtype not in _NUMPY and moved:
            flat = flat.view(torch.uint8)
        elif lent.dtype == torch.bfloat16:
            flat, dtype = flat.view(torch.int16), bfloat16()
        elif lent.dtype not in _NUMPY:
            raise TypeError(f"there is no reduction of {lent.dtype}: convert it, such as by tensor.float()")
        if not lent.is_cpu:
            self.device = lent.device
        found: Array = flat.numpy() if lent.is_cpu else cuda.as_array(flat)
        return found if dtype is None else found.view(dtype)

"""Tensors as arrays: without a copy where a tensor is contiguous and in the host's memory, else through a copy.

NumPy has no bfloat16: ml_dtypes gives it one, for reductions. What only moves goes as bytes where NumPy has no name
for the dtype.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch

from mpiddp.typing import Array

_NUMPY = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise TypeError("NumPy has no bfloat16 of its own: pip install ml_dtypes") from None


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether NumPy can look at the tensor's memory as it is."""
    return tensor.is_cpu and tensor.dtype in _NUMPY and tensor.is_contiguous() and not tensor.is_conj()


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of the host's memory as an array of its shape and strides, without a copy."""
    found = tensor.detach()
    if found.dtype == torch.bfloat16:
        return found.view(torch.int16).numpy().view(_bfloat16())
    return found.numpy()


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor, without a copy."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Loan:
    """Tensors lent to one call as flat arrays.

    What could not be lent itself is copied, and copied back by `give_back`.
    """

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor, *, moved: bool = False) -> Array:
        """Return the array of a tensor that is read only; ``moved``: its bytes will do."""
        return _flat(_host(tensor), moved)

    def output(self, tensor: torch.Tensor, *, moved: bool = False) -> Array:
        """Return the array of a tensor that is written to, and may be read before; ``moved``: its bytes will do."""
        host = _host(tensor)
        if host.data_ptr() != tensor.data_ptr() or host.device != tensor.device:
            self._copies.append((tensor, host))
        return _flat(host, moved)

    def give_back(self) -> None:
        """Copy results to where they belong."""
        for tensor, host in self._copies:
            tensor.detach().copy_(host)
        self._copies.clear()


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, contiguous and in the host's memory."""
    found = tensor.detach()
    if found.layout is not torch.strided:
        raise TypeError(f"this operation takes dense tensors, got one of layout {found.layout}; pass tensor.to_dense()")
    if not found.is_cpu:
        found = found.cpu()
    return found.resolve_conj().resolve_neg().contiguous()


def _flat(host: torch.Tensor, moved: bool) -> Array:
    flat = host.view(-1)
    if host.dtype in _NUMPY:
        return flat.numpy()
    if host.dtype == torch.bfloat16 and not moved:
        return flat.view(torch.int16).numpy().view(_bfloat16())
    if moved:
        return flat.view(torch.uint8).numpy()
    raise TypeError(f"there is no reduction of {host.dtype}: convert it, such as by tensor.float()")

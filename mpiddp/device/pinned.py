"""Pinned host memory, in sizes that are powers of two.

It is kept for reuse, because pinning costs as much as several copies.
"""

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from mpiddp.typing import Array

from .namespace import cupy
from .stream import Mark

_SMALLEST_BYTES = 1 << 12
_PORTABLE = 1  # cudaHostRegisterPortable
_free: dict[int, list[Array]] = defaultdict(list)
_lent: deque[tuple[Mark, Array]] = deque()


def take(nbytes: int) -> Array:
    """Return at least ``nbytes`` of pinned memory; hand it to `give` after use."""
    size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    with contextlib.suppress(IndexError):  # no memory of this size is free
        return _free[size].pop()
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(size), np.uint8, size)


def give(memory: Array) -> None:
    """Take back memory that no pending copy uses."""
    _free[memory.size].append(memory)


def give_when(reached: Mark, memory: Array) -> None:
    """Take back memory when ``reached``, a mark behind its last copy, has been reached. Each call tests these marks."""
    _lent.append((reached, memory))
    while _lent and _lent[0][0].Test():
        give(_lent.popleft()[1])


def pin(memory: Array) -> Callable[[], None]:
    """Pin existing memory for all devices, and return the function that unpins it. Raise OSError if CUDA cannot."""
    runtime, address = cupy().cuda.runtime, memory.ctypes.data
    try:
        runtime.hostRegister(address, memory.nbytes, _PORTABLE)
    except runtime.CUDARuntimeError as error:
        raise OSError(f"CUDA cannot pin it: {error}") from error
    return functools.partial(runtime.hostUnregister, address)

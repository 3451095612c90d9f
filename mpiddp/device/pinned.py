"""Host memory that a device can copy from and to while the host goes on: pinned, and kept for the next use.

To pin memory takes as long as to copy it several times, so what has been pinned stays, in pieces of which each is twice
as long as the one before.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict, deque
from typing import Any

import numpy as np

from mpiddp.typing import Array

from .stream import Mark

_SMALLEST_BYTES = 1 << 12
_free: dict[int, list[Array]] = defaultdict(list)
_lent: deque[tuple[Mark, Array]] = deque()


def take(nbytes: int) -> Array:
    """Return pinned memory of at least ``nbytes``, as an array of bytes; `give` it back when nobody uses it."""
    size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    with contextlib.suppress(IndexError):  # threads that load data take memory too
        return _free[size].pop()
    memory: Any = importlib.import_module("cupy").cuda.alloc_pinned_memory(size)
    return np.frombuffer(memory, np.uint8, size)


def give(memory: Array) -> None:
    """Take memory from `take` back; no copy from or to it may be on its way."""
    _free[memory.size].append(memory)


def give_when(reached: Mark, memory: Array) -> None:
    """Take memory back once a mark has been reached, behind which no copy from or to it is on its way."""
    _lent.append((reached, memory))
    while _lent and _lent[0][0].Test():
        give(_lent.popleft()[1])


def register(start: int, nbytes: int) -> str:
    """Pin memory that is there already; return why that was not possible, or an empty string.

    References
    ----------
    cudaHostRegister, with the flags portable and mapped: kernels may read it at its own address.
    """
    cupy = importlib.import_module("cupy")
    try:
        cupy.cuda.runtime.hostRegister(start, nbytes, _PORTABLE | _MAPPED)
    except RuntimeError as error:  # CuPy's CUDARuntimeError
        return str(error)
    return ""


def unregister(start: int) -> None:
    """Undo `register`."""
    importlib.import_module("cupy").cuda.runtime.hostUnregister(start)


_PORTABLE, _MAPPED = 1, 2


def forget() -> None:
    """Give all memory back."""
    _free.clear()
    _lent.clear()

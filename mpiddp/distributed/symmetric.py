"""Symmetric memory for programs: arrays that collectives reduce where they lie."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Literal

import numpy as np

from mpiddp import device as devices
from mpiddp.algorithms.gpu import cuda_ipc
from mpiddp.errors import DistError
from mpiddp.shm import segment
from mpiddp.typing import Array, DTypeLike

from .dispatch import perform
from .groups import GroupLike, member


def symmetric_empty(
    shape: int | tuple[int, ...],
    dtype: DTypeLike = np.float32,
    group: GroupLike = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Array | None:
    """Return an uninitialised array in memory that all ranks of the node share.

    An array like any other; collectives recognise it, and contiguous views of it, and copy nothing that the operation
    does not need: an all-reduce takes about the time of one copy of the array. All ranks of the group call this with
    equal arguments; each may drop its array when it likes. The memory lives as long as any view of it.

    Parameters
    ----------
    shape : int or tuple of int
        Its shape.
    dtype : dtype, default float32
        Its type, without Python objects.
    group : ProcessGroup, optional
        The ranks that call; all by default. Groups of some of these ranks may use the array too.
    device : {"cpu", "cuda"}, default "cpu"
        Where it lies; "cuda": a CuPy array on this rank's GPU, mapped by the others of the node through CUDA IPC. It is
        in use until the last view of it is gone, may then be given out again, and is freed with the group.

    Returns
    -------
    array
        Ordinary memory, with one warning that says why, where the system gives no shared memory: collectives are right
        on it too, and slower. None on a rank that is not in the group.

    Raises
    ------
    TypeError
        If the shape is not of integers, or the dtype of Python objects.
    ValueError
        If the shape has a negative dimension, or there is no such device.
    MismatchError
        On every rank, if ranks ask for different sizes.
    DistError
        If a GPU is asked for and there is none.

    Examples
    --------
    >>> gradients = dist.symmetric_empty(1_000_000)  # doctest: +SKIP
    >>> dist.all_reduce(gradients)  # doctest: +SKIP
    """
    found = member(group, "symmetric_empty")
    if found is None:
        return None
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"symmetric_empty needs a dtype of numbers, got {kind}")
    extents = tuple(map(operator.index, shape if np.iterable(shape) else (shape,)))
    if any(extent < 0 for extent in extents):
        raise ValueError(f"symmetric_empty needs a shape without negative dimensions, got {extents}")
    on_gpu = _checked(device) == "cuda"
    find = cuda_ipc.empty if on_gpu else segment.empty
    memory, fault = perform("symmetric_empty", found, False, (), find, math.prod(extents) * kind.itemsize)
    if memory is not None:
        shared: Array = memory.view(kind).reshape(extents)
        return shared
    if fault and found.link.rank == 0:
        cure = "see that the ranks of a node see each other's GPUs and processes" if on_gpu else _CURE
        warnings.warn(
            f"no shared memory for symmetric_empty({extents}, {kind}) ({fault}): it returns ordinary arrays, and"
            f" collectives copy; {cure}",
            stacklevel=2,
        )
    return devices.empty(extents, kind) if on_gpu else np.empty(extents, kind)


_CURE = "free memory, or raise the limits of /dev/shm and of the job"


def _checked(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise ValueError(f'symmetric_empty needs "cpu" or "cuda" as `device`, got {device!r}')
    fault = devices.cuda_fault() if device == "cuda" else None
    if fault is not None:
        raise DistError(f'symmetric_empty with device="cuda": {fault}')
    return device

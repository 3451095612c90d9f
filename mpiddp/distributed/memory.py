"""Symmetric memory for programs: arrays that collectives reduce where they lie."""

from __future__ import annotations

import math
import warnings

import numpy as np

from mpiddp.mpi import symmetric
from mpiddp.typing import Array, DTypeLike

from .collectives import perform
from .groups import GroupLike, member


def symmetric_empty(
    shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, group: GroupLike = None
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

    Returns
    -------
    array
        Ordinary memory, with one warning that says why, where the system gives no shared memory: collectives are right
        on it too, and slower. None on a rank that is not in the group.

    Raises
    ------
    MismatchError
        On every rank, if ranks ask for different sizes.

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
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"symmetric_empty needs a shape without negative dimensions, got {extents}")
    memory, fault = perform("symmetric_empty", found, False, (), symmetric.empty, math.prod(extents) * kind.itemsize)
    if memory is not None:
        shared: Array = memory.view(kind).reshape(extents)
        return shared
    if fault and found.link.rank == 0:
        warnings.warn(
            f"no shared memory for symmetric_empty({extents}, {kind}) ({fault}): it returns ordinary arrays, and"
            " collectives copy; free memory, or raise the limits of /dev/shm and of the job",
            stacklevel=2,
        )
    return np.empty(extents, kind)

"""Symmetric memory for programs: arrays that collectives reduce in place."""

import math
import operator
import sys

import numpy as np

from mpiddp.algorithms import handshake
from mpiddp.algorithms.plan import Plan
from mpiddp.faults.calls import make_call
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call
from mpiddp.mpi.recorder import warn
from mpiddp.mpi.requests import Steps
from mpiddp.shm import segment
from mpiddp.typing import Array, DTypeLike

from .dispatch import perform
from .groups import GroupLike, member


def symmetric_empty(
    shape: int | tuple[int, ...],
    dtype: DTypeLike = np.float32,
    group: GroupLike = None,
    device: str = "cpu",
) -> Array | None:
    """Return an uninitialised array in memory that all ranks of the node share.

    Collectives recognise the array and contiguous views of it, and reduce it without copying: an all-reduce of a long
    array takes about the time of one copy. The memory lives as long as any view of it. If the system gives no shared
    memory, rank 0 warns with the reason, and the arrays are ordinary ones. They are also ordinary ones, without a
    warning, if no two ranks of the group are on one node.

    Parameters
    ----------
    shape : int or tuple of int
        Of the same size on all ranks.
    dtype : dtype, default float32
        The same on all ranks, and without Python objects.
    group : ProcessGroup, optional
        The ranks that make the call; all by default. Groups of some of these ranks may use the array, too.
    device : {"cpu"}, default "cpu"
        Ranks share no memory of GPUs.

    Raises
    ------
    TypeError, ValueError
        For a dtype with Python objects; for a negative dimension, more memory than there can be, or another device.

    Examples
    --------
    >>> gradients = dist.symmetric_empty(1_000_000)
    >>> gradients[:] = 0.5
    >>> dist.all_reduce(gradients)
    >>> gradients[:2].tolist(), gradients.dtype.name
    ([1.0, 1.0], 'float32')
    """
    group = member(group, "symmetric_empty")
    if group is None:
        return None
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"symmetric_empty needs a dtype of numbers, got {kind}")
    extents = tuple(map(operator.index, shape if np.iterable(shape) else (shape,)))
    if any(extent < 0 for extent in extents):
        raise ValueError(f"symmetric_empty needs a shape without negative dimensions, got {extents}")
    if device != "cpu":
        raise ValueError(
            f'symmetric_empty makes arrays of the host, device="cpu", got {device!r}; take cupy.empty for a GPU, whose'
            " arrays every collective takes as they are"
        )
    nbytes = math.prod(extents) * kind.itemsize
    if nbytes > sys.maxsize // group.size() - 2 * segment.ALIGNMENT_BYTES:
        raise ValueError(f"symmetric_empty({extents}, {kind}) wants {nbytes:,} bytes a rank, more than there can be")
    call = make_call(group._link, "symmetric_empty", dtype=np.dtype(np.uint8), count=nbytes, self_comparing=True)
    memory, fault = perform(group, Plan(call, _allocate), (nbytes,))
    if memory is not None:
        shared: Array = memory.view(kind).reshape(extents)
        return shared
    if fault and group._link.rank == 0:
        warn(
            f"no shared memory for symmetric_empty({extents}, {kind}) ({fault}): it returns ordinary arrays, and"
            " collectives copy; free memory, or raise the limits of /dev/shm and of the job"
        )
    return np.empty(extents, kind)


def _allocate(link: Link, call: Call, nbytes: int) -> Steps:
    """Return this rank's region and an empty text; or None, and a text on what went wrong on some rank.

    If every node has one rank, return None and an empty text.
    """
    yield from handshake.compare(link, call)
    if not link.shares_memory:
        return None, ""
    page, node = segment.ALIGNMENT_BYTES, link.node
    region_bytes = -(-(segment.SKEW_BYTES + nbytes) // page) * page
    allocation: segment.Allocation = yield from segment.allocate(node, link, region_bytes)
    if allocation.memory is None:
        return None, allocation.fault
    segment.register(allocation, node.ranks, node.rank)
    start = node.rank * region_bytes + segment.SKEW_BYTES
    return np.frombuffer(allocation.memory, np.uint8, nbytes, start), ""

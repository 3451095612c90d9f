"""``shared_on_node``: one copy of a data set on each node, for all ranks of that node."""

import math
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mpiddp import distributed as dist
from mpiddp.algorithms.plan import plain
from mpiddp.distributed.dispatch import perform
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.distributed.objects import gathered
from mpiddp.errors import MismatchError
from mpiddp.faults.calls import make_call
from mpiddp.mpi.link import Link
from mpiddp.mpi.recorder import warn
from mpiddp.mpi.requests import READY, Steps
from mpiddp.shm import segment
from mpiddp.typing import Array

ALIGNMENT_BYTES = 64
"""Arrays in shared memory begin at multiples of a cache line."""


@dataclass(frozen=True)
class _Outline:
    """Shape and dtype of an array, and path and offset if it is a mapped file.

    The first rank of a node sends it to the others, which then find the array in shared memory or map the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: str | None = None
    offset: int = 0
    order: Literal["C", "F"] = "C"

    @classmethod
    def of(cls, x: Array) -> "_Outline":
        # Only a mapping of a whole file is mapped by other ranks: NumPy does not tell the file offset of a slice of it.
        if isinstance(x, np.memmap) and isinstance(x.base, mmap.mmap) and x.filename is not None:
            return cls(x.shape, x.dtype, str(x.filename), x.offset, "C" if x.flags.c_contiguous else "F")
        return cls(x.shape, x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that the array takes in shared memory, rounded up to `ALIGNMENT_BYTES`; 0 for a mapped file."""
        exact = 0 if self.file else math.prod(self.shape) * self.dtype.itemsize
        return -(-exact // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def place(self, memory: Array, start: int) -> Array:
        """Return the array, mapped from its file or as a view of shared ``memory`` from byte ``start`` on."""
        if self.file:
            return np.memmap(self.file, self.dtype, "r", self.offset, self.shape, self.order)
        end = start + math.prod(self.shape) * self.dtype.itemsize
        return memory[start:end].view(self.dtype).reshape(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.name} {self.shape}"


def shared_on_node(load: Callable[[], Sequence[Array]], group: GroupLike = None) -> tuple[Array, ...]:
    """Load arrays on one rank of each node, and give all ranks of that node the same memory to read.

    All ranks of the group call this. On each node the first rank calls ``load``, and the others wait. The arrays that
    ``load`` returns are copied to shared memory, so they exist twice until the originals are dropped. If each node has
    one rank only, nothing is copied.

    Parameters
    ----------
    load : callable
        A function that returns NumPy arrays. Whole mapped files (``numpy.memmap``) are not copied: all ranks map them.
        An exception in ``load`` is raised on every rank, as a RuntimeError if it cannot be pickled. A note names the
        rank where it was raised, unless that is rank 0.
    group : ProcessGroup, optional
        All ranks by default.

    Returns
    -------
    tuple of ndarray
        The arrays, read-only. The memory lives as long as any view of it. If there is no shared memory, every rank
        loads arrays of its own, and one warning says why. The tuple is empty on a rank outside of the group.

    Raises
    ------
    MismatchError
        On every rank, if shapes or dtypes differ between nodes.

    Examples
    --------
    >>> data = ArrayDataset(*shared_on_node(lambda: digits().arrays))  # doctest: +SKIP
    """
    found = member(group, "shared_on_node")
    if found is None:
        return ()
    link = found._link
    first = link.node.rank == 0
    arrays, fault = _attempt(lambda: _loaded(load)) if first else ([], None)
    # A barrier with a timeout polls, and soon sleeps between polls. Without one, ranks on several nodes would wait for
    # a download inside of MPI, which keeps their cores busy.
    dist.barrier(found, timeout=link.timeout_s)
    told = _exchange(found, fault or (list(map(_Outline.of, arrays)) if first else None))
    outlines = _agreed(found, told)
    if len(set(link.nodes)) == link.size:
        return tuple(map(_read_only, arrays))
    total = sum(each.nbytes for each in outlines)
    memory, reason = np.empty(0, np.uint8), ""
    if any(each.nbytes for said in told if said for each in said):
        memory, reason = perform(
            found, plain(link, _allocate, make_call(link, "shared_on_node")), (total + segment.SKEW_BYTES,)
        )
    if reason and link.rank == 0:
        warn(
            f"no shared memory for a data set of {total:,} bytes ({reason}): every rank keeps a copy of its own; free "
            "memory, or raise the limits of /dev/shm and of the job"
        )
    if reason:
        shared, fault = (arrays, None) if first else _attempt(lambda: _loaded(load))
    else:
        shared, fault = _attempt(lambda: _placed(outlines, memory))
        for mine, x in zip(shared, arrays, strict=False):
            if not isinstance(mine, np.memmap):
                mine[...] = x
    _exchange(found, fault)  # no rank returns before the first rank of its node has copied the arrays
    return tuple(map(_read_only, shared))


def _attempt(action: Callable[[], list[Array]]) -> tuple[list[Array], Exception | None]:
    """Return an action's result, or its exception in a form that can be pickled."""
    try:
        return action(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return [], RuntimeError(f"{type(error).__name__}: {error}")
        return [], error


def _loaded(load: Callable[[], Sequence[Array]]) -> list[Array]:
    arrays = list(load())
    for x in arrays:
        if not isinstance(x, np.ndarray) or x.dtype.hasobject:
            what = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
            raise TypeError(f"shared_on_node needs a function that returns NumPy arrays of numbers, got {what}")
    return arrays


def _exchange(group: ProcessGroup, said: Any) -> list[Any]:
    """Return the objects of all ranks; if some of them are exceptions, raise the first on all ranks."""
    told = gathered(group, "shared_on_node", said)
    for rank, each in enumerate(told):
        if isinstance(each, Exception):
            error = said if rank == group.rank() else each
            if rank:
                world = group._link.world
                error.add_note(f"on rank {group.ranks[rank]}, host {world.hosts[group._link.ranks[rank]]}")
            raise error
    return told


def _agreed(group: ProcessGroup, told: "Sequence[list[_Outline] | None]") -> "list[_Outline]":
    """Return the outlines of this rank's node, after comparing those of all nodes."""
    loaded = {rank: said for rank, said in enumerate(told) if said is not None}
    one = min(loaded)
    for rank, said in loaded.items():
        if list(map(str, said)) != list(map(str, loaded[one])):
            sides = [f"{', '.join(map(str, loaded[each]))} on rank {group.ranks[each]}" for each in (one, rank)]
            raise MismatchError(
                f"nodes have loaded different data, {' and '.join(sides)}; give every node the same files"
            )
    nodes = group._link.nodes
    return loaded[nodes.index(nodes[group.rank()])]


def _allocate(link: Link, nbytes: int) -> Steps:
    """Allocate ``nbytes`` that the ranks of each node share.

    Return the memory and an empty text, or an empty array and the reason for the failure.
    """
    yield READY
    # Every rank allocates a part near itself; the parts are consecutive.
    page = segment.ALIGNMENT_BYTES
    part = max(-(-nbytes // (link.node.size * page)), 1) * page
    found: segment.Allocation = yield from segment.allocate(link.node, link, part)
    memory = np.empty(0, np.uint8) if found.memory is None else np.frombuffer(found.memory, np.uint8)
    return memory, found.fault


def _placed(outlines: "Sequence[_Outline]", memory: Array) -> list[Array]:
    arrays, start = [], segment.SKEW_BYTES
    for each in outlines:
        arrays.append(each.place(memory, start))
        start += each.nbytes
    return arrays


def _read_only(x: Array) -> Array:
    seen: Array = x.view(np.ndarray)
    seen.flags.writeable = False
    return seen

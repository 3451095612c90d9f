"""Memory of devices that all ranks of a node can read and write where it is.

As `mpiddp.shm.segment` on the host: a segment has a region for each rank, and from the place of an array follow the
places of its peers. A rank's region is memory of its own GPU, which the others have mapped through CUDA IPC; each
handle is opened once. Whether kernels can really use what they have mapped is found out by a write to every peer, which
reads it, and all ranks agree.

What a program drops goes to a list of its group, and the group's next array takes it from there: memory that others map
is freed only with the group (`release`): barrier, unmap the peers', barrier, free.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.device import ipc, place, stream
from mpiddp.errors import MismatchError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel, Link
from mpiddp.mpi.work import Steps
from mpiddp.shm.segment import NOWHERE, Place
from mpiddp.typing import Array


class Lease:
    """Held by the arrays over this rank's region of a segment: while it lives, the region is in use."""


class Segment:
    """Memory of some ranks of a node, as this process sees it.

    Parameters
    ----------
    number : int
        The same on all ranks, and on no two segments that exist at once.
    memory : ipc.Memory
        This rank's region.
    starts : dict
        Where the region of each world rank begins, in this process.
    mine : int
        World rank of this process.
    """

    def __init__(self, number: int, memory: ipc.Memory, starts: dict[int, int], mine: int) -> None:
        self.number, self.memory = number, memory
        self._starts, self._mine = starts, mine
        self.start, self.end = memory.start, memory.start + memory.nbytes
        self._lease: weakref.ref[Lease] | None = None

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` elements at ``offset`` bytes of the region of a world rank, as a flat array."""
        return ipc.array(self._starts[rank] + offset, count * dtype.itemsize, self, self.memory.device).view(dtype)

    def free(self) -> bool:
        """Tell whether no array of the program lies in it."""
        return self._lease is None or self._lease() is None

    def lease(self, nbytes: int) -> Array:
        """Return this rank's region as an array of bytes; it is in use until the last view of that is gone."""
        lease = Lease()
        lease.memory = self.memory  # type: ignore[attr-defined]  # outlives the group, if the array does
        self._lease = weakref.ref(lease)
        return ipc.array(self.start, nbytes, lease, self.memory.device)

    def unmap(self) -> None:
        """Unmap the peers' regions."""
        for rank, start in self._starts.items():
            if rank != self._mine:
                ipc.close_handle(start, self.memory.device)


_segments: dict[int, Segment] = {}
_by_start: dict[int, Segment] = {}
_starts: list[int] = []
_of_link: dict[int, list[Segment]] = {}


def find(x: Array) -> Place:
    """Return where ``x``, an array on a device, lies in memory that is shared in this way, or `NOWHERE`."""
    address = ipc.address(x)
    index = bisect_right(_starts, address) - 1
    if index < 0 or not x.nbytes:
        return NOWHERE
    found = _by_start[_starts[index]]
    if address + x.nbytes > found.end:
        return NOWHERE
    return Place(found.number, address - found.start)


def segment(number: int) -> Segment | None:
    """Return the segment that has a number, if this process is one of those that share it."""
    return _segments.get(number)


_MOST_FREE = 16
_FIT = 2  # a region is not taken for less than this part of it


def empty(link: Link, nbytes: int) -> Steps:
    """Find or make memory of ``nbytes`` for each rank of a group, on the device that is current when it calls.

    Returns
    -------
    tuple of (array of bytes or None, str)
        As the value of the steps: this rank's region, or None and why there is none, on all ranks alike.

    Raises
    ------
    MismatchError
        On every rank, if ranks ask for different sizes.
    """
    kept, device = _of_link.setdefault(link.id, []), place.here()
    usable = [each for each in kept if each.memory.device == device and each.free()]
    fits = [each.number for each in usable if nbytes <= each.memory.nbytes <= _room(nbytes)]
    told = np.zeros((link.size, 1 + _MOST_FREE), np.int64)
    mine = np.array([nbytes, *fits[:_MOST_FREE], *[0] * (_MOST_FREE - len(fits))], np.int64)
    yield link.now.Iallgather(mine, told)
    odd = int((told[:, 0] != told[0, 0]).argmax())
    if odd:
        raise MismatchError(
            f"symmetric_empty was called for {told[0, 0]} bytes on rank {link.ranks[0]} and for {told[odd, 0]} bytes on"
            f" rank {link.ranks[odd]} of {link}; shape and dtype must be equal on all ranks"
        )
    if len(set(link.nodes)) == link.size:
        return None, ""
    common = _in_common(told[:, 1:], link.nodes)
    if common is not None:
        found = _segments[common[link.nodes[link.rank]]]
        ipc.settle(device)  # kernels of its last user may not have ended
    else:
        made, fault = yield from make(link.node, link, nbytes, device)
        if made is None:
            return None, fault
        found = made
        kept.append(made)
        _segments[made.number] = _by_start[made.start] = made
        insort(_starts, made.start)
    return found.lease(nbytes), ""


def _room(nbytes: int) -> int:
    return max(_FIT * nbytes, ipc.GRANULE_BYTES)


def _in_common(told: Array, nodes: tuple[int, ...]) -> dict[int, int] | None:
    """Return a free segment for each node that all of its ranks have told of; None if a node has none."""
    chosen = {}
    for node in set(nodes):
        rows = [set(row.tolist()) - {0} for row, where in zip(told, nodes, strict=True) if where == node]
        both = set.intersection(*rows)
        if not both:
            return None
        chosen[node] = min(both)
    return chosen


_TOLD = struct.Struct(f"<q{ipc.HANDLE_BYTES}s")


def make(node: Channel, everybody: Channel, nbytes: int, device: int) -> Steps:
    """Allocate on ``device``, exchange handles, map and try; all ranks of ``everybody`` succeed, or none does."""
    fault, memory, handle = "", None, bytes(ipc.HANDLE_BYTES)
    try:
        memory = ipc.Memory(nbytes, device)
        handle = memory.handle()
    except RuntimeError as error:
        fault = str(error)
    mine = _TOLD.pack(secrets.randbits(62) | 1, handle)
    told = bytearray(len(mine) * node.size)
    yield node.later.Iallgather(mine, told)
    numbers, handles = zip(*_TOLD.iter_unpack(bytes(told)), strict=True)
    opened: dict[int, int] = {}
    for rank, other in zip(node.ranks, handles, strict=True):
        if not fault and rank != node.ranks[node.rank]:
            try:
                opened[rank] = ipc.open_handle(other, device)
            except RuntimeError as error:
                fault = str(error)
    fault = yield from agreed(everybody, fault)
    if not fault:
        assert memory is not None
        tried = Segment(numbers[0], memory, opened | {node.ranks[node.rank]: memory.start}, node.ranks[node.rank])
        fault = yield from _try(node, tried)
        fault = yield from agreed(everybody, fault)
    if not fault:
        return tried, ""
    for start in opened.values():
        with contextlib.suppress(RuntimeError):  # of a device that has failed; the others wait at the barrier
            ipc.close_handle(start, device)
    yield node.later.Ibarrier()  # nobody frees what others map
    return None, fault


def agreed(everybody: Channel, fault: str) -> Steps:
    """Return this rank's fault, or that others have one."""
    worst = np.array([bool(fault)], np.int64)
    yield everybody.later.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX)
    return fault or ("another rank cannot" if worst[0] else "")


def _try(node: Channel, tried: Segment) -> Steps:
    """Let every rank write to every other one's memory and read what is there; return what was wrong, or nothing.

    What fails on one rank must not leave the others waiting, so each waits for its device before it comes to a barrier,
    where what a kernel has done wrong is an error of this rank's.
    """
    kind = np.dtype(np.int64)
    views = [tried.view(rank, 0, node.size, kind) for rank in node.ranks]
    side = stream.side("add", views[node.rank])

    def clear() -> None:
        views[node.rank].fill(0)

    def write() -> None:
        for rank, view in enumerate(views):
            view[node.rank : node.rank + 1] = _token(node.rank, rank)

    def read() -> None:
        for rank, view in enumerate(views):
            row = view.get()  # type: ignore[attr-defined]
            if row.tolist() != [_token(writer, rank) for writer in range(node.size)]:
                raise RuntimeError("what is written through CUDA IPC is not what is read")

    fault = _fault_of(clear, side)
    yield node.later.Ibarrier()
    fault = fault or _fault_of(write, side)
    yield node.later.Ibarrier()
    return fault or _fault_of(read, side)


def _fault_of(step: Callable[[], None], side: Any) -> str:
    """Do a step of the trial on a stream to its end, and return what went wrong, or nothing."""
    try:
        with stream.on(side):
            step()
        stream.mark(side).Wait()
    except Exception as error:  # of CUDA, of CuPy, of its compiler: whatever it is, this way is not to be gone
        return str(error) or type(error).__name__
    return ""


def _token(writer: int, reader: int) -> int:
    return (writer + 1) * 1_000_003 + reader


def release(link: Link) -> Steps:
    """Give the memory of a group back; its ranks call together, and no operation is on its way."""
    kept = _of_link.pop(link.id, [])
    for each in kept:
        del _segments[each.number], _by_start[each.start]
        _starts.remove(each.start)
    if kept:
        yield from close(link, kept)


_abandoned: list[Segment] = []
"""Segments of groups that were given up: nobody hears when the others have unmapped them, so they are never freed."""


def close(link: Link, segments: list[Segment]) -> Steps:
    """Unmap the peers' regions of segments, when nobody uses them any more; none is freed before all have done so.

    The ranks of the group call together; of one that was given up, each does it for itself.
    """
    try:
        yield link.later.Ibarrier()
    except MismatchError:
        _abandoned.extend(segments)
        for each in segments:
            ipc.settle(each.memory.device)  # kernels of what was on its way
            each.unmap()
        return
    for each in segments:
        each.unmap()
    yield link.later.Ibarrier()

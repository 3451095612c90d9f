"""CUDA IPC: GPU memory mapped by all ranks of a node, in segments as in `mpiddp.shm.segment`.

Mapped memory is tried: every rank writes to every peer, which reads it, and all agree on the outcome. A region without
arrays serves the group's next one. It is freed with the group: barrier, unmap, barrier, free.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.device import ipc, place, stream
from mpiddp.errors import DistError, MismatchError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel, Link, Resource
from mpiddp.mpi.requests import Steps
from mpiddp.shm.segment import NOWHERE, Location
from mpiddp.typing import Array


class Lease: ...


class DeviceSegment:
    """Memory of a node's ranks; ``starts``: the world ranks' regions here."""

    def __init__(self, number: int, memory: ipc.Memory, starts: dict[int, int], mine: int) -> None:
        self.number, self.memory = number, memory
        self._starts, self._mine = starts, mine
        self.start, self.end = memory.start, memory.start + memory.nbytes
        self._lease: weakref.ref[Lease] | None = None

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        return ipc.array(self._starts[rank] + offset, count * dtype.itemsize, self, self.memory.device).view(dtype)

    def free(self) -> bool:
        """Return True without arrays of the program."""
        return self._lease is None or self._lease() is None

    def lease(self, nbytes: int) -> Array:
        """Return this rank's region as bytes, in use until their last view."""
        lease = Lease()
        lease.memory = self.memory  # type: ignore[attr-defined]  # outlives the group, if the array does
        self._lease = weakref.ref(lease)
        return ipc.array(self.start, nbytes, lease, self.memory.device)

    def unmap(self) -> None:
        for rank, start in self._starts.items():
            if rank != self._mine:
                ipc.close_handle(start, self.memory.device)


_segments: dict[int, DeviceSegment] = {}
_by_start: dict[int, DeviceSegment] = {}
_starts: list[int] = []


class Segments(Resource):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._segments: list[DeviceSegment] = []

    def free(self, device: int) -> list[DeviceSegment]:
        return [each for each in self._segments if each.memory.device == device and each.free()]

    def add(self, made: DeviceSegment) -> None:
        """Let `find` recognise arrays in ``made``."""
        self._segments.append(made)
        _segments[made.number] = _by_start[made.start] = made
        insort(_starts, made.start)

    def close(self) -> None:
        if self._segments:
            self._forget()
            unmap_together(self._link, self._segments)
            self._segments = []

    def drop(self, error: DistError) -> None:
        """Unmap the peers' regions; keep this rank's, which they may still map."""
        self._forget()
        for each in self._segments:
            unmap_when_idle(each)

    def _forget(self) -> None:
        for each in self._segments:
            del _segments[each.number], _by_start[each.start]
            _starts.remove(each.start)


def unmap_together(link: Link, segments: Sequence[DeviceSegment]) -> None:
    """Unmap before any rank frees; collective."""
    link.later.Ibarrier().Wait()
    for each in segments:
        each.unmap()
    link.later.Ibarrier().Wait()


def unmap_when_idle(segment: DeviceSegment) -> None:
    """Unmap, unless kernels may still use it."""
    if stream.idle(segment.memory.device):
        segment.unmap()


def find(x: Array) -> Location:
    address = ipc.address(x)
    index = bisect_right(_starts, address) - 1
    if index < 0 or not x.nbytes:
        return NOWHERE
    found = _by_start[_starts[index]]
    if address + x.nbytes > found.end:
        return NOWHERE
    return Location(found.number, address - found.start)


def segment(number: int) -> DeviceSegment | None:
    return _segments.get(number)


_MOST_FREE = 16
_FIT = 2  # regions of up to so many times an array serve it


def empty(link: Link, nbytes: int) -> Steps:
    """Find or make ``nbytes`` for each rank, on the current device; return one's region, or None and the fault."""
    kept, device = link.resource(Segments), place.here()
    most = max(_FIT * nbytes, ipc.GRANULE_BYTES)
    fits = [each.number for each in kept.free(device) if nbytes <= each.memory.nbytes <= most]
    told = np.zeros((link.size, 1 + _MOST_FREE), np.int64)
    mine = np.array([nbytes, *fits[:_MOST_FREE], *[0] * (_MOST_FREE - len(fits))], np.int64)
    yield link.now.Iallgather(mine, told)
    odd = int((told[:, 0] != told[0, 0]).argmax())
    if odd:
        raise MismatchError(
            f"symmetric_empty was called for {told[0, 0]} bytes on rank {link.ranks[0]} and for {told[odd, 0]} bytes on"
            f" rank {link.ranks[odd]} of {link}; shape and dtype must be equal on all ranks"
        )
    if not link.shares_memory:
        return None, ""
    common = _in_common(told[:, 1:], link.nodes)
    if common is not None:
        found = _segments[common[link.nodes[link.rank]]]
        ipc.settle(device)  # its last user's kernels may be pending
    else:
        made, fault = yield from make(link.node, link, nbytes, device)
        if made is None:
            return None, fault
        found = made
        kept.add(made)
    return found.lease(nbytes), ""


def _in_common(told: Array, nodes: tuple[int, ...]) -> dict[int, int] | None:
    """Return a segment of each node, free on all its ranks."""
    common: dict[int, set[int]] = {}
    for row, node in zip(told.tolist(), nodes, strict=True):
        free = set(row) - {0}
        common[node] = common[node] & free if node in common else free
    return {node: min(free) for node, free in common.items()} if all(common.values()) else None


_TOLD = struct.Struct(f"<q{ipc.HANDLE_BYTES}s")


def make(node: Channel, everybody: Channel, nbytes: int, device: int) -> Steps:
    """Allocate, exchange handles, map and try; return the segment, or None and the fault, alike on all."""
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
        tried = DeviceSegment(numbers[0], memory, opened | {node.ranks[node.rank]: memory.start}, node.ranks[node.rank])
        fault = yield from _try(node, tried)
        fault = yield from agreed(everybody, fault)
    if not fault:
        return tried, ""
    for start in opened.values():
        with contextlib.suppress(RuntimeError):  # of a failed device; the others wait at the barrier
            ipc.close_handle(start, device)
    yield node.later.Ibarrier()  # no rank frees memory that others map
    return None, fault


def agreed(everybody: Channel, fault: str) -> Steps:
    worst = np.array([bool(fault)], np.int64)
    yield everybody.later.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX)
    return fault or ("another rank cannot" if worst[0] else "")


def _try(node: Channel, tried: DeviceSegment) -> Steps:
    """Write to every peer's memory and read one's own; return the fault.

    Each rank waits for its device before a barrier: a kernel's fault then is its own.
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
    try:
        with stream.on(side):
            step()
        stream.mark(side).Wait()
    except Exception as error:  # of CUDA, CuPy or its compiler
        return str(error) or type(error).__name__
    return ""


def _token(writer: int, reader: int) -> int:
    return (writer + 1) * 1_000_003 + reader

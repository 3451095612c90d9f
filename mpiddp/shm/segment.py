"""Segments: memory mapped by all ranks of a group on a node, a region for each.

From an array's place `Segment.view` makes the peer's array, without a message. The memory is an anonymous file (memfd)
of the node's first rank, which the others open through ``/proc/PID/fd``: nothing stays behind, and a small ``/dev/shm``
does not bound it. Where that is forbidden, a file in ``/dev/shm`` is unlinked once all have opened it. Every rank
populates its region, and all agree before any is touched: a write to a missing page would end the process. A mapping
lives as long as the ``mmap`` at the root of its arrays' base chain; a view by another library keeps it without naming
it, and is found by its address.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

ALIGNMENT_BYTES = mmap.PAGESIZE
FILES = Path("/dev/shm")
_POPULATE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14


class Location(NamedTuple):
    """The segment's number, and the offset in the rank's region in bytes."""

    segment: int
    offset: int


NOWHERE = Location(0, 0)


def address_of(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


class Segment:
    """Memory of some ranks of a node, mapped into this process; does not keep it.

    ``number`` is unique, and equal on all ranks; regions are in the order of ``ranks``, world ranks; ``rank`` is an
    index.
    """

    def __init__(self, number: int, memory: mmap.mmap, ranks: tuple[int, ...], rank: int) -> None:
        self.number = number
        self._memory = weakref.ref(memory)
        self._region_bytes = len(memory) // len(ranks)
        self._starts = {world: index * self._region_bytes for index, world in enumerate(ranks)}
        self._own = address_of(np.frombuffer(memory, np.uint8)) + rank * self._region_bytes

    def place(self, x: Array) -> Location:
        offset = address_of(x) - self._own
        inside = offset >= 0 and offset + x.nbytes <= self._region_bytes
        return Location(self.number, offset) if inside else NOWHERE

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements of a world rank's region, flat."""
        memory = self._memory()
        assert memory is not None, "the caller holds an array in it"
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(memory, dtype, count, self._starts[rank] + offset)


_of_mapping: weakref.WeakKeyDictionary[mmap.mmap, Segment] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


def find(x: Array) -> Location:
    """Return the place in symmetric memory, or `NOWHERE`."""
    base: Any = x.base
    while type(base) in (np.ndarray, memoryview):  # the second is of np.frombuffer
        base = base.obj if type(base) is memoryview else base.base
    if type(base) is mmap.mmap:
        found = _of_mapping.get(base)
        return NOWHERE if found is None else found.place(x)
    if base is not None:
        for found in tuple(_of_mapping.values()):
            place = found.place(x)
            if place.segment:
                return place
    return NOWHERE


def segment(number: int) -> Segment:
    return _by_number[number]


def forget() -> None:
    """World ranks have changed: all symmetric arrays become ordinary."""
    _of_mapping.clear()
    _by_number.clear()


class _File(NamedTuple):
    name: str
    make: Callable[[], tuple[int, int]]
    """Returns descriptor and key."""
    path: Callable[[int, int], Path]
    """By the maker's process and the key."""
    stays: bool
    """Until it is unlinked."""


def _make_anonymous() -> tuple[int, int]:
    descriptor = os.memfd_create("mpiddp")
    return descriptor, descriptor


def _anonymous_path(maker_pid: int, key: int) -> Path:
    return Path(f"/proc/{maker_pid}/fd/{key}")


def _make_named() -> tuple[int, int]:
    key = secrets.randbits(62)
    return os.open(_named_path(0, key), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), key


def _named_path(_: int, key: int) -> Path:
    return FILES / f"mpiddp-{key:016x}"


_FILES = (
    _File("memfd", _make_anonymous, _anonymous_path, stays=False),
    _File(str(FILES), _make_named, _named_path, stays=True),
)


class Allocation(NamedTuple):
    memory: mmap.mmap | None
    number: int
    fault: str


def allocate(node: Channel, everybody: Channel, region_bytes: int) -> Steps:
    """Share memory among the ranks of ``node``; all ranks of ``everybody`` succeed, or none.

    ``region_bytes`` of each rank are a multiple of `ALIGNMENT_BYTES`. Collective, on ``later``; returns an
    `Allocation`.
    """
    faults = []
    for kind in _FILES:
        memory, fault = None, 0
        descriptor, key = -1, 0
        # The segment's number; the maker's process and the file's key in it; device and inode.
        told = np.zeros(5, np.int64)
        if node.rank == 0:
            try:
                descriptor, key = kind.make()
                os.ftruncate(descriptor, node.size * region_bytes)
                stat = os.fstat(descriptor)
                told[:] = 1 + secrets.randbits(62), os.getpid(), key, stat.st_dev, stat.st_ino
            except (OSError, AttributeError) as error:  # without memfd_create
                fault = getattr(error, "errno", errno.ENOSYS)
        yield node.later.Ibcast(told, 0)
        if node.rank != 0:
            try:
                descriptor = _open(kind, told)
            except OSError as error:
                fault = error.errno or errno.EIO
        yield node.later.Ibarrier()
        if node.rank == 0 and descriptor >= 0 and kind.stays:
            kind.path(os.getpid(), key).unlink(missing_ok=True)
        if not fault:
            try:
                memory = mmap.mmap(descriptor, node.size * region_bytes)
                _populate(memory, descriptor, node.rank * region_bytes, region_bytes)
            except OSError as error:
                fault = error.errno or errno.EIO
            except ValueError:  # the first rank asked for smaller regions
                fault = errno.EINVAL
        if descriptor >= 0:
            os.close(descriptor)
        worst = np.array([fault])
        yield everybody.later.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX)
        if not worst[0]:
            return Allocation(memory, int(told[0]), "")
        faults.append(f"{kind.name}: {os.strerror(int(worst[0]))}")
    return Allocation(None, 0, "; ".join(faults))


def _open(kind: _File, told: Array) -> int:
    _, maker_pid, key, device, inode = told.tolist()
    if not inode:
        raise OSError(errno.ENOENT, "the maker has failed")
    descriptor = os.open(kind.path(maker_pid, key), os.O_RDWR | os.O_NOCTTY)
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino) != (device, inode):  # another namespace: the number is another process's
        os.close(descriptor)
        raise OSError(errno.ESRCH, "not the maker's file")
    return descriptor


def _populate(memory: mmap.mmap, descriptor: int, start: int, nbytes: int) -> None:
    """Allocate a region's pages, near this rank and outside of core dumps; OSError if there are not enough.

    Parallel page faults of 512 MiB on 2 ranks take 0.4 s each; ``posix_fallocate``, with its lock, 0.4 and 0.6 s.
    """
    memory.madvise(mmap.MADV_DONTDUMP)
    try:
        memory.madvise(_POPULATE, start, nbytes)
    except OSError as error:
        if error.errno == errno.EFAULT:  # a touch would have raised SIGBUS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(descriptor, start, nbytes)  # an older kernel


def register(found: Allocation, ranks: tuple[int, ...], rank: int) -> None:
    """Let `find` recognise its arrays."""
    assert found.memory is not None
    made = Segment(found.number, found.memory, ranks, rank)
    _of_mapping[found.memory] = _by_number[made.number] = made

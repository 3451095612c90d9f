"""Segments: memory that all ranks of a group on a node map, with a region for each rank.

A rank that knows where in its region another rank's array lies can read and write the array, by `Segment.view`.

The memory is an anonymous file (memfd) of the node's first rank, which the others open through ``/proc/PID/fd``. No
file stays behind, and a small ``/dev/shm`` does not limit the size. If a rank cannot do this, a file in ``/dev/shm`` is
used instead, and unlinked once all ranks have opened it.

Every rank populates the pages of its region, and all agree that this has worked before any page is used: a write to a
page that the system cannot provide would end the process.

A mapping lives as long as an array over it: NumPy's arrays lead to its ``mmap`` by their ``base``. A view that another
library has made keeps the mapping without leading to it, and is recognised by its address.
"""

import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

ALIGNMENT_BYTES = mmap.PAGESIZE
SKEW_BYTES = mmap.PAGESIZE // 2
"""Arrays in shared memory begin in the middle of a page, because most others begin at the beginning of one.

On AMD's processors since Zen 3, a glibc with bug 30994 takes up to 14 times as long for a copy if the target lies a
little further behind the beginning of its page than the source [1]_. NumPy's long arrays begin 16 bytes behind it, so a
copy to one of them from the beginning of a page would be such a copy.

References
----------
.. [1] REP MOVSB performance suffers from page aliasing, bug 30994 of glibc, https://sourceware.org/bugzilla.
"""
_MEMFD, FILES = "memfd", Path("/dev/shm")
_POPULATE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux has it from 5.14 on


class Location(NamedTuple):
    """The location of an array: the segment's number, and the offset in this rank's region in bytes."""

    segment: int
    offset: int


NOWHERE = Location(0, 0)
"""The location of an array that is in no segment."""


def address_of(x: Array) -> int:
    """Return where a contiguous array begins. NumPy's own answer takes eight times as long."""
    return MPI.Get_address(x)


class Segment:
    """The memory of some ranks of a node, mapped into this process. Only its arrays keep it alive.

    ``number`` is unique, and the same on all ranks. ``ranks`` are ranks of the world, in the order of their regions;
    ``rank`` is the index of this rank among them.
    """

    def __init__(self, number: int, memory: mmap.mmap, ranks: tuple[int, ...], rank: int) -> None:
        self.number = number
        self._memory = weakref.ref(memory)
        self._region_bytes = len(memory) // len(ranks)
        self._starts = {world: index * self._region_bytes for index, world in enumerate(ranks)}
        self._own = address_of(np.frombuffer(memory, np.uint8)) + rank * self._region_bytes

    def locate(self, x: Array) -> Location:
        """Return where an array lies in this rank's region, or `NOWHERE`."""
        offset = address_of(x) - self._own
        inside = offset >= 0 and offset + x.nbytes <= self._region_bytes
        return Location(self.number, offset) if inside else NOWHERE

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` elements, ``offset`` bytes into the region of a rank of the world, as a flat array."""
        memory = self._memory()
        assert memory is not None, "the caller holds an array in it"
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(memory, dtype, count, self._starts[rank] + offset)


_of_mapping: weakref.WeakKeyDictionary[mmap.mmap, Segment] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


def find(x: Array) -> Location:
    """Return where an array lies in symmetric memory, or `NOWHERE`."""
    base: Any = x.base
    while type(base) in (np.ndarray, memoryview):  # np.frombuffer puts a memoryview between array and mmap
        base = base.obj if type(base) is memoryview else base.base
    if type(base) is mmap.mmap:
        own = _of_mapping.get(base)
        return NOWHERE if own is None else own.locate(x)
    if base is not None:
        for each in tuple(_of_mapping.values()):
            location = each.locate(x)
            if location.segment:
                return location
    return NOWHERE


def segment(number: int) -> Segment:
    return _by_number[number]


def forget() -> None:
    """Treat all symmetric arrays as ordinary ones from now on, because the world's ranks have been numbered anew."""
    _of_mapping.clear()
    _by_number.clear()


def random_bits() -> int:
    """Return 62 random bits. To import `secrets` for them takes longer than to import all of `mpiddp.shm`."""
    return int.from_bytes(os.urandom(8), "little") >> 2


def _make(kind: str) -> tuple[int, int]:
    """Return the descriptor of a new file, and the key by which others find it."""
    if kind == _MEMFD:
        descriptor = os.memfd_create("mpiddp")
        return descriptor, descriptor
    key = random_bits()
    return os.open(_path(kind, 0, key), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), key


def _path(kind: str, maker_pid: int, key: int) -> Path:
    return Path(f"/proc/{maker_pid}/fd/{key}") if kind == _MEMFD else FILES / f"mpiddp-{key:016x}"


class Allocation(NamedTuple):
    """Memory and the number of its segment; or None, and in ``fault`` the reason."""

    memory: mmap.mmap | None
    number: int
    fault: str


def allocate(node: Channel, everybody: Channel, region_bytes: int) -> Steps:
    """Share memory among the ranks of ``node``, and return an `Allocation`.

    All ranks of ``everybody`` call this together; all of them get memory, or none. ``region_bytes``, the size of each
    rank's region, is a multiple of `ALIGNMENT_BYTES`. It communicates on ``later``.
    """
    faults = []
    for kind in (_MEMFD, str(FILES)):
        memory, fault = None, 0
        descriptor, key = -1, 0
        # The segment's number, the maker's process id, the file's key, and the file's device and inode.
        told = np.zeros(5, np.int64)
        if node.rank == 0:
            try:
                descriptor, key = _make(kind)
                os.ftruncate(descriptor, node.size * region_bytes)
                stat = os.fstat(descriptor)
                told[:] = 1 + random_bits(), os.getpid(), key, stat.st_dev, stat.st_ino
            except (OSError, AttributeError) as error:  # AttributeError: this Python has no memfd_create
                fault = getattr(error, "errno", errno.ENOSYS)
        yield node.later.Ibcast(told, 0)
        if node.rank != 0:
            try:
                descriptor = _open(kind, told)
            except OSError as error:
                fault = error.errno or errno.EIO
        yield node.later.Ibarrier()
        if node.rank == 0 and descriptor >= 0 and kind != _MEMFD:
            _path(kind, 0, key).unlink(missing_ok=True)
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
        faults.append(f"{kind}: {os.strerror(int(worst[0]))}")
    return Allocation(None, 0, "; ".join(faults))


def _open(kind: str, told: Array) -> int:
    _, maker_pid, key, device, inode = told.tolist()
    if not inode:
        raise OSError(errno.ENOENT, "the maker has failed")
    descriptor = os.open(_path(kind, maker_pid, key), os.O_RDWR | os.O_NOCTTY)
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino) != (device, inode):  # the process id is another process's, in another namespace
        os.close(descriptor)
        raise OSError(errno.ESRCH, "not the maker's file")
    return descriptor


def _populate(memory: mmap.mmap, descriptor: int, start: int, nbytes: int) -> None:
    """Let the system provide a region's pages, near this rank, and leave them out of core dumps.

    OSError if there are not enough pages. For 512 MiB on each of 2 ranks this takes 0.4 s on both ranks.
    ``posix_fallocate`` takes 0.4 s on one rank and 0.6 s on the other, because it takes a lock.
    """
    memory.madvise(mmap.MADV_DONTDUMP)
    try:
        memory.madvise(_POPULATE, start, nbytes)
    except OSError as error:
        if error.errno == errno.EFAULT:  # a write to these pages would have raised SIGBUS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(descriptor, start, nbytes)  # for kernels before 5.14


def register(allocation: Allocation, ranks: tuple[int, ...], rank: int) -> None:
    """Let `find` recognise arrays in the memory of ``allocation``."""
    assert allocation.memory is not None
    made = Segment(allocation.number, allocation.memory, ranks, rank)
    _of_mapping[allocation.memory] = _by_number[made.number] = made

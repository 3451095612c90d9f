"""Symmetric memory: arrays that every rank of a node can read and write where they are.

A segment is one piece of memory, mapped by all ranks of a group on a node, with a region for each. What `find` knows
of an array is where it lies in which segment; from that and from the place of a peer's array, `Segment.view` makes the
peer's array, and nothing has to be sent.

The memory is an anonymous file (memfd) that the first rank of the node makes and the others open through
``/proc/PID/fd``: nothing stays behind however the job ends, and a container's small ``/dev/shm`` does not bound it.
Where that is not allowed, a file in ``/dev/shm`` is unlinked as soon as all have opened it. Every rank allocates the
pages of its region, near itself, and all agree before any of them is touched: a write to a page that is not there would
be the end of the process. A mapping lives as long as the ``mmap`` object at the root of the arrays' base chain: NumPy
shortens those chains, so an array's own end says nothing about the views of it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.faults.calls import comparing
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

if TYPE_CHECKING:
    from mpiddp.mpi.link import Channel, Link

ALIGNMENT_BYTES = mmap.PAGESIZE
FILES = Path("/dev/shm")


class Place(NamedTuple):
    """Where an array lies: the number of its segment, and its offset in the rank's region in bytes."""

    segment: int
    offset: int


NOWHERE = Place(0, 0)
"""The place of an ordinary array."""


class Segment:
    """Memory of some ranks of a node, mapped into this process; does not keep it.

    Parameters
    ----------
    number : int
        The same on all ranks, and on no two segments that exist at once: the number of the file.
    memory : mmap
        The mapping.
    ranks : tuple of int
        World ranks of those who share it, in the order of their regions.
    rank : int
        Place of this process among them.
    """

    def __init__(self, number: int, memory: mmap.mmap, ranks: tuple[int, ...], rank: int) -> None:
        self.number = number
        self._memory = weakref.ref(memory, self._forget)
        self._region_bytes = len(memory) // len(ranks)
        self._starts = {world: index * self._region_bytes for index, world in enumerate(ranks)}
        self.start: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0] + rank * self._region_bytes
        """Address of this rank's region."""
        self.end = self.start + self._region_bytes

    def _forget(self, _: object) -> None:
        if _by_start.get(self.start) is self:
            del _segments[self.number], _by_start[self.start]
            _starts.remove(self.start)

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` elements at ``offset`` bytes of the region of a world rank, as a flat array."""
        memory = self._memory()
        assert memory is not None, "somebody who uses a segment holds an array in it"
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(memory, dtype, count, self._starts[rank] + offset)


_segments: dict[int, Segment] = {}
_by_start: dict[int, Segment] = {}
_starts: list[int] = []


def find(x: Array) -> Place:
    """Return where ``x`` lies in symmetric memory of this process, or `NOWHERE`."""
    if not _starts:
        return NOWHERE
    base: Any = x.base
    while type(base) is np.ndarray:
        base = base.base
    if base is None:  # it owns its memory
        return NOWHERE
    address = x.__array_interface__["data"][0]
    index = bisect_right(_starts, address) - 1
    if index < 0:
        return NOWHERE
    segment = _by_start[_starts[index]]
    if address + x.nbytes > segment.end:
        return NOWHERE
    return Place(segment.number, address - segment.start)


def segment(number: int) -> Segment:
    """Return the segment that has a number."""
    return _segments[number]


def _make_anonymous() -> tuple[int, int]:
    descriptor = os.memfd_create("mpiddp")
    return descriptor, descriptor


def _open_anonymous(maker_pid: int, found_by: int) -> int:
    return os.open(f"/proc/{maker_pid}/fd/{found_by}", os.O_RDWR)


def _path(found_by: int) -> Path:
    return FILES / f"mpiddp-{found_by:016x}"


def _make_named() -> tuple[int, int]:
    found_by = secrets.randbits(62)
    return os.open(_path(found_by), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), found_by


def _open_named(_: int, found_by: int) -> int:
    return os.open(_path(found_by), os.O_RDWR)


def _hide_named(found_by: int) -> None:
    _path(found_by).unlink(missing_ok=True)


class _Way(NamedTuple):
    """A kind of file: how its maker gets it and what the others find it by, how they do, and what they need not see."""

    name: str
    make: Callable[[], tuple[int, int]]
    open: Callable[[int, int], int]
    hide: Callable[[int], None]


_WAYS = (
    _Way("memfd", _make_anonymous, _open_anonymous, lambda _: None),
    _Way(str(FILES), _make_named, _open_named, _hide_named),
)


class Allocation(NamedTuple):
    """What `allocate` has found: memory, or why there is none."""

    memory: mmap.mmap | None
    number: int
    fault: str


def allocate(node: Channel, everybody: Channel, region_bytes: int) -> Steps:
    """Share memory among the ranks of a node; all ranks of ``everybody`` succeed, or none does.

    Parameters
    ----------
    node : Channel
        The ranks that share it.
    everybody : Channel
        Those who must come to the same end; contains ``node``.
    region_bytes : int
        Size of each rank's region; a multiple of `ALIGNMENT_BYTES`.

    Returns
    -------
    Allocation
        As the value of the steps, which send on ``later`` only.
    """
    faults = []
    for way in _WAYS:
        memory, fault = None, 0
        descriptor, found_by = -1, 0
        told = np.zeros(4, np.int64)  # the maker's process, what finds the file; device and number to know it by
        if node.rank == 0:
            try:
                descriptor, found_by = way.make()
                os.ftruncate(descriptor, node.size * region_bytes)
                stat = os.fstat(descriptor)
                told[:] = os.getpid(), found_by, stat.st_dev, stat.st_ino
            except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
                fault = getattr(error, "errno", errno.ENOSYS)
        yield node.later.Ibcast(told, 0)
        if node.rank != 0:
            try:
                descriptor = _open(way, told)
            except OSError as error:
                fault = error.errno or errno.EIO
        yield node.later.Ibarrier()
        if node.rank == 0 and descriptor >= 0:
            way.hide(found_by)
        if not fault:
            try:
                # Not the mapping of somebody else's pages but the first touch of them needs them to be there.
                os.posix_fallocate(descriptor, node.rank * region_bytes, region_bytes)
                memory = mmap.mmap(descriptor, node.size * region_bytes)
            except OSError as error:
                fault = error.errno or errno.EIO
        if descriptor >= 0:
            os.close(descriptor)
        worst = np.array([fault])
        yield everybody.later.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX)
        if not worst[0]:
            return Allocation(memory, int(told[3]), "")
        faults.append(f"{way.name}: {os.strerror(int(worst[0]))}")
    return Allocation(None, 0, "; ".join(faults))


def _open(way: _Way, told: Array) -> int:
    """Open the file that its maker tells of."""
    if not told[3]:
        raise OSError(errno.ENOENT, "the maker has failed")
    descriptor = way.open(int(told[0]), int(told[1]))
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino) != (told[2], told[3]):  # here that number means another process
        os.close(descriptor)
        raise OSError(errno.ESRCH, "not the maker's file")
    return descriptor


@comparing
def empty(link: Link, nbytes: int) -> Steps:
    """Make symmetric memory of ``nbytes`` for each rank of a group.

    Returns
    -------
    tuple of (array of bytes or None, str)
        As the value of the steps: this rank's region, or None and why there is none, on all ranks alike. A group with
        one rank on every node needs none.

    Raises
    ------
    MismatchError
        On every rank, if ranks ask for different sizes.
    """
    sizes = np.empty(link.size, np.int64)
    yield link.now.Iallgather(np.array([nbytes]), sizes)
    odd = int((sizes != sizes[0]).argmax())
    if odd:
        raise MismatchError(
            f"symmetric_empty was called for {sizes[0]} bytes on rank {link.ranks[0]} and for {sizes[odd]} bytes on"
            f" rank {link.ranks[odd]} of {link}; shape and dtype must be equal on all ranks"
        )
    if len(set(link.nodes)) == link.size:
        return None, ""
    region_bytes = max(-(-nbytes // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
    found: Allocation = yield from allocate(link.node, link, region_bytes)
    if found.memory is None:
        return None, found.fault
    register(found, link.node.ranks, link.node.rank)
    return np.frombuffer(found.memory, np.uint8, nbytes, link.node.rank * region_bytes), ""


def register(found: Allocation, ranks: tuple[int, ...], rank: int) -> None:
    """Let `find` recognise arrays in this memory, as long as it is mapped."""
    assert found.memory is not None
    made = Segment(found.number, found.memory, ranks, rank)
    _segments[made.number] = _by_start[made.start] = made
    insort(_starts, made.start)


def forget() -> None:
    """Let all arrays of this process be ordinary ones, because world ranks now name other processes than before."""
    _segments.clear()
    _by_start.clear()
    _starts.clear()


class Scratch:
    """Memory of a group on a node, through which ordinary arrays pass in pieces; made when it is first used.

    Each rank has three slots, used in turns. Turns are counted, one for each barrier: when a rank writes for turn t it
    has left the barrier of turn t - 1, so everybody has by then read what turn t - 3 wrote, of which the last is read
    after the barrier of turn t - 2.
    """

    PIECE_BYTES = 1 << 21
    """Length of a slot."""
    _SLOTS = 3
    _MOST_VIEWS = 256

    def __init__(self) -> None:
        self._regions: list[Array] = []
        self._views: dict[tuple[int, int, np.dtype[Any]], list[Array]] = {}
        self._turn = 0
        self.ready = False
        """Whether there is memory."""
        self.fault = ""
        """Why there is none; empty before it has been tried, and where there is."""

    def prepare(self, node: Channel, everybody: Channel) -> Steps:
        """Make the memory if nobody has, and tell whether there is some; see `allocate`."""
        if not self.ready and not self.fault:
            found: Allocation = yield from allocate(node, everybody, self._SLOTS * self.PIECE_BYTES)
            self.fault = found.fault
            if found.memory is not None:
                self._regions = list(np.frombuffer(found.memory, np.uint8).reshape(node.size, -1))
                self.ready = True
        return self.ready

    def upcoming(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return the memory of every rank for ``count`` elements that the next `turn` returns, too."""
        slot = self._turn % self._SLOTS
        found = self._views.get((slot, count, dtype))
        if found is None:
            start = slot * self.PIECE_BYTES
            found = [region[start : start + count * dtype.itemsize].view(dtype) for region in self._regions]
            if len(self._views) >= self._MOST_VIEWS:
                self._views.clear()
            self._views[slot, count, dtype] = found
        return found

    def turn(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Begin the next turn and return memory of every rank for ``count`` elements."""
        memory = self.upcoming(count, dtype)
        self._turn += 1
        return memory

    def close(self) -> None:
        """Give the memory back."""
        self.ready = False
        self._regions, self._views = [], {}

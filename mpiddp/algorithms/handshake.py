"""The handshake: the ranks exchange the records of their calls, and where their arrays lie, before any data moves.

All ranks then go on in the same way, or raise the same error. Ranks that access each other's memory need a barrier
before that, and the handshake is this barrier. Between nodes the handshake is the first step of every call that gives
an array to an MPI collective. It has the same size in all calls, because MPI fails when the ranks' collectives differ:
Open MPI's non-blocking ones go on after a truncation and write over freed memory, and MPICH fails an assertion. A short
array travels with the handshake (see `short`). Calls without a handshake are hashed, and the next handshake compares
the hashes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiddp.errors import DistError
from mpiddp.faults.calls import RECORD, Calls, compare_records, first_difference
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel, Link, Resource
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import All, Awaited, Steps
from mpiddp.shm.segment import NOWHERE, Location, segment
from mpiddp.typing import Array

from .tags import Tag

# The fields are the call's number and record, the segment and offset of the array, the factor, and the history.
_ENTRY = struct.Struct("<qQqqqqdq")
SLOT_BYTES = 1 << 10
"""The room for a short array in every handshake between nodes, in groups of at most `MAX_ROWS` ranks."""
SLOT_START = _ENTRY.size
ROW_BYTES = SLOT_START + SLOT_BYTES
_DIRECT_RANKS = 4
"""In groups of at most this size, each rank sends its row to each other rank. MPI's all-gather would take longer."""
MAX_ROWS = 16
"""In larger groups on several nodes the ranks first compare hashes by an all-reduce, because a rank would receive too
many rows."""
_PLACE_AND_FACTOR = slice(32, 56)


class Entries(NamedTuple):
    segments: Array
    """Each array's segment; 0 for an ordinary array, in place of which `two_shot` also tells negative numbers."""
    offsets: Array
    """Each array's offset in its segment's region in bytes. For an ordinary array this is its address, or 0 if nobody
    needs the address."""
    factors: Array
    """The ranks' factors of PREMUL_SUM; 1 in other calls."""
    segment: int | None
    """The number of the segment, if all arrays have the same; else None."""

    def of(self, ranks: Array) -> Entries:
        return _entries(self.segments[ranks], self.offsets[ranks], self.factors[ranks])

    def views(self, node: Channel, x: Array) -> list[Array] | None:
        """Return the arrays of a node's ranks, which are like ``x``; None unless they lie in one segment."""
        if self.segment is None or self.segment <= 0:
            return None
        found, offsets = segment(self.segment), self.offsets.tolist()
        return [found.view(rank, offset, x.size, x.dtype) for rank, offset in zip(node.ranks, offsets, strict=True)]

    def factors_of(self, op: ReduceOp) -> list[float] | None:
        """Return the factors of PREMUL_SUM; None for other reductions."""
        return None if op.factor is None else self.factors.tolist()


def _entries(segments: Array, offsets: Array, factors: Array) -> Entries:
    first = int(segments[0])
    return Entries(segments, offsets, factors, first if (segments == first).all() else None)


@functools.lru_cache(maxsize=256)
def _cached_entries(size: int, entries: bytes) -> Entries:
    """Return the entries of ranks whose calls agree, cached for the next step of a training.

    ``entries`` is bytes because these tell a factor of 0.0 from -0.0.
    """
    segments, offsets, factors = np.frombuffer(entries, np.int64).reshape(size, -1).T
    return _entries(segments, offsets, factors.view(np.float64))


def exchange(link: Link, call: Call, place: Location, op: ReduceOp | None) -> Steps:
    """Wait for every rank; return their `Entries`. MismatchError on all ranks if calls differ.

    After that the ranks may read and write each other's arrays: earlier operations on them have ended (see
    `Queue.delays`).
    """
    factor = 1.0 if op is None or op.factor is None else op.factor
    if link.one_node or link.size <= MAX_ROWS:
        return (yield from _meet(link, link.now, pack(link, call, place, factor)))
    yield from compare(link, call)
    return (yield from _meet(link, link.later, pack(link.after(), call, place, factor)))


def compare(link: Link, call: Call) -> Steps:
    """Wait for every rank; MismatchError on all, if calls differ."""
    mine = pack(link, call)
    if link.one_node or link.size <= MAX_ROWS:
        yield from _meet(link, link.now, mine)
        return
    digest = hash(_ENTRY.unpack(mine))
    bounds = np.array([digest, ~digest])
    yield link.now.Iallreduce(MPI.IN_PLACE, bounds, MPI.MIN)
    if bounds[0] != ~bounds[1]:
        yield from _meet(link, link.later, mine)


def without(algorithm: Callable[..., Steps]) -> Callable[..., Steps]:
    """Return an algorithm as steps that do not compare the call."""
    return functools.wraps(algorithm)(lambda link, call, *args: algorithm(link, *args))


def before(algorithm: Callable[..., Steps]) -> Callable[..., Steps]:
    """Return an algorithm as steps that first compare the call."""

    @functools.wraps(algorithm)
    def compared(link: Link, call: Call, *args: Any) -> Steps:
        yield from compare(link, call)
        return (yield from algorithm(link.after(), *args))

    return compared


class Slot:
    """The buffers of one handshake in a small group on several nodes: a row from each rank."""

    __slots__ = ("_comm", "_messages", "_mine", "_row", "_starts", "rows", "told")

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self.told = comm, bytearray(ROW_BYTES * comm.size)
        self._starts = range(0, ROW_BYTES * comm.size, ROW_BYTES)
        rows = [memoryview(self.told)[start : start + ROW_BYTES] for start in self._starts]
        self._row, self._mine = rows[comm.rank], b""
        others = [rank for rank in range(comm.size) if rank != comm.rank] if comm.size <= _DIRECT_RANKS else []
        receives = [comm.Recv_init(rows[rank], rank, Tag.HANDSHAKE) for rank in others]
        self._messages = All(receives + [comm.Send_init(self._row, rank, Tag.HANDSHAKE) for rank in others])
        """Persistent messages from and to all other ranks; none in groups of more than `_DIRECT_RANKS`."""
        self.rows = functools.lru_cache(maxsize=256)(functools.partial(_rows, self.told, self._starts))
        """The function that returns, of each rank's array, ``count`` elements of a dtype from number ``first`` on."""

    def begin(self, mine: bytes, x: Array | None) -> Awaited:
        """Send this rank's entry, and ``x`` of at most `SLOT_BYTES`, to all ranks."""
        row, self._mine = self._row, mine
        row[:SLOT_START] = mine
        if x is not None:
            row[SLOT_START : SLOT_START + x.nbytes] = x.tobytes()
        for request in self._messages.requests:
            request.Start()
        return self._messages if self._messages.requests else self._comm.Iallgather(MPI.IN_PLACE, self.told)

    def free(self) -> None:
        for request in self._messages.requests:
            request.Free()

    def agrees(self) -> bool:
        """Return True if all ranks have sent this rank's entry."""
        mine, told = self._mine, self.told
        for start in self._starts:  # noqa: SIM110 - half the time of all()
            if not told.startswith(mine, start):
                return False
        return True


def _rows(told: bytearray, starts: range, dtype: np.dtype[Any], count: int, first: int = 0) -> list[Array]:
    skipped = SLOT_START + first * dtype.itemsize
    return [np.frombuffer(told, dtype, count, start + skipped) for start in starts]


class Slots(Resource):
    """A group's `Slot` objects that no call in flight holds, for each of its communicators."""

    def __init__(self, link: Link) -> None:
        self._now, self._free = link.now, (list[Slot](), list[Slot]())

    def take(self, comm: MPI.Intracomm) -> Slot:
        free = self._free[comm is self._now]
        return free.pop() if free else Slot(comm)

    def give(self, slot: Slot, comm: MPI.Intracomm) -> None:
        self._free[comm is self._now].append(slot)

    def close(self) -> None:
        for slot in (*self._free[0], *self._free[1]):
            slot.free()

    def drop(self, error: DistError) -> None:
        """Forget all slots, so that the next handshake makes one and finds the communicator aborted."""
        self._free = ([], [])


def pack(link: Link, call: Call, place: Location = NOWHERE, factor: float = 1.0) -> bytes:
    if link.now is link.later:
        # This is a later step of an operation. Meanwhile the program may have made other calls, so `link.sequence` and
        # `link.history` may differ between ranks.
        return _ENTRY.pack(0, *call.record, *place, factor, 0)
    return _ENTRY.pack(link.sequence, *call.record, *place, factor, link.history)


def _meet(link: Link, comm: MPI.Intracomm, mine: bytes) -> Steps:
    if link.one_node or link.size > MAX_ROWS:
        told = bytearray(len(mine) * link.size)
        yield comm.Iallgather(mine, told)
        agree = told == mine * link.size
    else:  # this sends as many bytes as with a short array, because other ranks may send one
        slots = link.resource(Slots)
        slot = slots.take(comm)
        yield slot.begin(mine, None)
        agree, told = slot.agrees(), slot.told
        slots.give(slot, comm)
    if agree:
        return _cached_entries(link.size, mine[_PLACE_AND_FACTOR] * link.size)
    if link.one_node:  # the calls agree if the rows differ only in the arrays' places and the factors
        rows = [told[start : start + len(mine)] for start in range(0, len(told), len(mine))]
        calls = slice(0, _PLACE_AND_FACTOR.start)
        if all(row[calls] == mine[calls] for row in rows):
            return _cached_entries(link.size, b"".join(row[_PLACE_AND_FACTOR] for row in rows))
    return (yield from differing(link, told))


def differing(link: Link, told: bytearray) -> Steps:
    """Return the entries of arrays at different places; MismatchError if calls differ."""
    table = np.frombuffer(told, np.int64).reshape(link.size, -1)[:, : _ENTRY.size // 8].copy()
    if not link.one_node and (table[:, [0, -1]] != table[0, [0, -1]]).any():  # an earlier call differs
        yield from _find_difference(link)
    compare_records(link, table[:, :4])
    segments, offsets, factors = table.T[4:7]
    return _entries(segments, offsets, factors.view(np.float64))


def _find_difference(link: Link) -> Steps:
    calls = link[Calls]  # it exists, because it has recorded the calls whose hashes differ
    calls.link.history = 0
    mine = calls.recent()
    told = np.empty((link.size, mine.size), RECORD)
    yield link.later.Iallgather([mine, MPI.BYTE], [told, MPI.BYTE])
    raise first_difference(link, link.ranks, told)

"""The handshake: an all-gather of calls and arrays' places, before ranks touch each other's memory.

It is the barrier needed anyway; all ranks then choose alike, or raise the same error. Between nodes it compares hashes
of all calls so far.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, RECORD, Call, Calls, compare_records, first_difference, make_call
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.shm.segment import NOWHERE, Location, Segment
from mpiddp.typing import Array

# Call; segment and offset; factor; history.
_ENTRY = struct.Struct("<qQqqqqdq")
_PLACE_AND_FACTOR = slice(32, 56)


class Entries(NamedTuple):
    segments: Array
    """0 for an ordinary array."""
    offsets: Array
    """Bytes in the segment's region, or an ordinary array's address."""
    factors: Array
    """Of PREMUL_SUM; else 1."""
    segment: int | None
    """Of all arrays, or None."""

    def of(self, ranks: Array) -> Entries:
        return _entries(self.segments[ranks], self.offsets[ranks], self.factors[ranks])

    def common_segment(self) -> int:
        """Return 0 for arrays elsewhere."""
        return max(self.segment or 0, 0)

    def views(self, found: Segment, ranks: tuple[int, ...], count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return the arrays in their common segment, of world ranks."""
        return [
            found.view(rank, offset, count, dtype) for rank, offset in zip(ranks, self.offsets.tolist(), strict=True)
        ]

    def factors_of(self, op: ReduceOp) -> list[float] | None:
        """Return None but for PREMUL_SUM."""
        return None if op.factor is None else self.factors.tolist()


def _entries(segments: Array, offsets: Array, factors: Array) -> Entries:
    first = int(segments[0])
    return Entries(segments, offsets, factors, first if (segments == first).all() else None)


@functools.lru_cache(maxsize=256)
def _equal_entries(size: int, entry: bytes) -> Entries:
    """Return read-only entries, the same for each step of a training; bytes tell a factor of 0.0 from -0.0."""
    segments, offsets, factors = np.frombuffer(entry * size, np.int64).reshape(size, -1).T
    return _entries(segments, offsets, factors.view(np.float64))


def exchange(
    link: Link,
    operation: str,
    x: Array,
    place: Location,
    op: ReduceOp | None,
    root: int = NO_ROOT,
) -> Steps:
    """Wait for every rank; one yield, on ``now``; MismatchError on all, if calls differ."""
    call = make_call(operation, x.dtype, op, x.size, root)
    return _exchange(link, call, place, 1.0 if op is None or op.factor is None else op.factor)


def compare(link: Link, call: Call) -> Steps:
    """Wait for every rank; MismatchError on all, if calls differ."""
    yield from _exchange(link, call, NOWHERE, 1.0)


def _exchange(link: Link, call: Call, place: Location, factor: float) -> Steps:
    # in a later step this rank may have begun other operations
    sequence = 0 if link.now is link.later else link.sequence
    mine = _ENTRY.pack(sequence, *call, *place, factor, _history(link))
    told = bytearray(len(mine) * link.size)
    yield link.now.Iallgather(mine, told)
    if told == mine * link.size:
        return _equal_entries(link.size, mine[_PLACE_AND_FACTOR])
    table = np.frombuffer(told, np.int64).reshape(link.size, -1)
    compare_records(link, table[:, :4])
    segments, offsets, factors, histories = table.T[4:]
    if not link.one_node and (histories != histories[0]).any():
        yield from _find_difference(link)
    return _entries(segments, offsets, factors.view(np.float64))


def _history(link: Link) -> int:
    """Return 0 where ranks see each other's calls."""
    calls = link.find(Calls)
    # in a later step this rank may have made other calls
    return 0 if link.one_node or calls is None or link.now is link.later else calls.history


def barrier(link: Link) -> Steps:
    """Wait for every rank of several nodes; MismatchError on all, if any calls so far differ."""
    history = _history(link)
    bounds = np.array([history, ~history])
    yield link.now.Iallreduce(MPI.IN_PLACE, bounds, MPI.MIN)
    if bounds[0] != ~bounds[1]:
        yield from _find_difference(link)


def _find_difference(link: Link) -> Steps:
    """Raise the first difference, on all ranks."""
    calls = link.find(Calls)
    assert calls is not None, "histories are its"
    calls.history = 0
    mine = calls.recent()
    told = np.empty((link.size, mine.size), RECORD)
    yield link.later.Iallgather([mine, MPI.BYTE], [told, MPI.BYTE])
    raise first_difference(link, told)

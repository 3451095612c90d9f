"""The handshake: the ranks exchange what they call, and where their arrays lie, before any data moves.

All ranks then go on alike, or raise the same error. Before ranks access each other's memory, it is the barrier needed
anyway. Between nodes it is the first step of every call that gives an array to an MPI collective, and has one size
whatever the call. For MPI does not stand collectives that differ: Open MPI's non-blocking ones go on after a truncation
and write over freed memory, and MPICH fails an assertion. A short array travels with the handshake (see `short`), which
also compares hashes of the calls that had none.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
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
SLOT_BYTES = 1 << 10
"""For a short array, in every handshake between nodes."""
SLOT_START = _ENTRY.size
ROW_BYTES = SLOT_START + SLOT_BYTES
FEW_RANKS = 16
"""In larger groups on several nodes the first step reduces a hash, as each rank would receive too many entries."""
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
    """Wait for every rank; one yield, on ``now``, in small groups; MismatchError on all, if calls differ."""
    calls = link.find(Calls)
    call = None if calls is None or link.now is link.later else calls.newest  # else this is a part of a call
    if call is None:
        call = make_call(operation, x.dtype, op, x.size, root)
    if link.one_node or link.size <= FEW_RANKS:
        entries, _ = yield from _meet(link, link.now, call, place, _factor(op))
    else:
        yield from compare(link, call)
        entries, _ = yield from _meet(link, link.later, call, place, _factor(op))
    return entries


def _factor(op: ReduceOp | None) -> float:
    return 1.0 if op is None or op.factor is None else op.factor


def compare(link: Link, call: Call) -> Steps:
    """Wait for every rank; MismatchError on all, if calls differ."""
    if not link.one_node and link.size > FEW_RANKS:
        digest = hash((_sequence(link), *call, _history(link)))
        bounds = np.array([digest, ~digest])
        yield link.now.Iallreduce(MPI.IN_PLACE, bounds, MPI.MIN)
        if bounds[0] == ~bounds[1]:
            return
        yield from _meet(link, link.later, call)
    else:
        yield from _meet(link, link.now, call)


def tell(link: Link, call: Call, op: ReduceOp | None, x: Array | None) -> Steps:
    """Compare calls in a small group on several nodes; return the entries, and each rank's ``x`` in its row's slot.

    ``x`` has at most `SLOT_BYTES`.
    """
    return _meet(link, link.now, call, NOWHERE, _factor(op), x)


def comparing(steps: Callable[..., Steps], call: Call) -> Callable[..., Steps]:
    """Return the steps behind a comparison of the call."""

    @functools.wraps(steps)
    def compared(link: Link, *args: Any) -> Steps:
        yield from compare(link, call)
        return (yield from steps(link.after(), *args))

    return compared


def _meet(
    link: Link,
    comm: MPI.Intracomm,
    call: Call,
    place: Location = NOWHERE,
    factor: float = 1.0,
    x: Array | None = None,
) -> Steps:
    """Return the entries, and what all ranks have sent: `ROW_BYTES` each in a small group on several nodes."""
    mine = _ENTRY.pack(_sequence(link), *call, *place, factor, _history(link))
    row, with_slots = mine, not link.one_node and link.size <= FEW_RANKS
    if with_slots:
        row = (mine if x is None else mine + x.tobytes()).ljust(ROW_BYTES, b"\0")
    told = bytearray(len(row) * link.size)
    yield comm.Iallgather(row, told)
    if with_slots:  # whose arrays may differ
        agree = all(told.startswith(mine, start) for start in range(0, len(told), ROW_BYTES))
    else:
        agree = told == mine * link.size
    if agree:
        return _equal_entries(link.size, mine[_PLACE_AND_FACTOR]), told
    table = np.ascontiguousarray(np.frombuffer(told, np.int64).reshape(link.size, -1)[:, : _ENTRY.size // 8])
    segments, offsets, factors = table.T[4:7]
    if not link.one_node and (table[:, [0, -1]] != table[0, [0, -1]]).any():  # an earlier call differs
        yield from _find_difference(link)
    compare_records(link, table[:, :4])
    return _entries(segments, offsets, factors.view(np.float64)), told


def _sequence(link: Link) -> int:
    """Return 0 in a later step, when this rank may have begun other operations."""
    return 0 if link.now is link.later else link.sequence


def _history(link: Link) -> int:
    """Return 0 where ranks see each other's calls, and in a later step."""
    calls = link.find(Calls)
    return 0 if link.one_node or calls is None or link.now is link.later else calls.history


def _find_difference(link: Link) -> Steps:
    """Raise the first difference, on all ranks."""
    calls = link.find(Calls)
    assert calls is not None, "histories are its"
    calls.history = 0
    mine = calls.recent()
    told = np.empty((link.size, mine.size), RECORD)
    yield link.later.Iallgather([mine, MPI.BYTE], [told, MPI.BYTE])
    raise first_difference(link, link.ranks, told)

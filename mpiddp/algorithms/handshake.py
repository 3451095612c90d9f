"""What the ranks tell each other before they touch each other's memory: what they call, and where their arrays lie.

One all-gather of a few bytes is the barrier that such an algorithm needs anyway. After it every rank knows the same of
all, so all choose the same way, and ranks that disagree all raise the same error. Between nodes it also tells whether
the ranks have made the same calls until now (see `faults.calls`).
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.faults.calls import NO_REDUCTION, NO_ROOT, checksum, describe, disagreement, packed, unpacked
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import dtype_code, dtype_layout
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.shm import segment as symmetric
from mpiddp.typing import Array

_OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")

# Operation, reduction, dtype, root, elements, layout; then what may differ: segment, offset, factor, earlier calls.
_FORMAT = struct.Struct("<BBHiqHqqdq")


class Entry(NamedTuple):
    """What one rank has told."""

    operation: int
    reduction: int
    dtype: int
    root: int
    length: int
    layout: int
    segment: int
    offset: int
    factor: float
    history: int

    def __str__(self) -> str:
        """Return the call as a person would name it."""
        return _OPERATIONS[self.operation] + describe(self.dtype, self.length, self.reduction, self.root, self.layout)


def meet(
    link: Link,
    operation: str,
    x: Array,
    op: ReduceOp | None = None,
    root: int = NO_ROOT,
    place: symmetric.Place | None = None,
) -> Steps:
    """Wait until every rank has come to this operation, and learn what all of them gave.

    Parameters
    ----------
    link : Link
        The group.
    operation : str
        Its name.
    x : array
        What this rank works on; the count and dtype must be equal on all ranks.
    op : ReduceOp, optional
        The reduction, equal on all ranks but for its factor.
    root : int, optional
        Group rank of the root.
    place : Place, optional
        What the others shall know of where ``x`` lies; by default its place in symmetric memory.

    Returns
    -------
    list of Entry
        As the value of the steps: one for each rank. One yield, on ``now``.

    Raises
    ------
    MismatchError
        On every rank, if their calls differ.
    """
    segment, offset = place or symmetric.find(x)
    mine = _FORMAT.pack(
        _OPERATIONS.index(operation),
        NO_REDUCTION if op is None else op.value,
        dtype_code(x.dtype),
        root,
        x.size,
        checksum(dtype_layout(x.dtype)),
        segment,
        offset,
        1.0 if op is None or op.factor is None else op.factor,
        _history(link),
    )
    told = bytearray(len(mine) * link.size)
    yield link.now.Iallgather(mine, told)
    entries = _read(bytes(told))
    first = entries[0][:6]
    for rank, entry in enumerate(entries):
        if entry[:6] != first:
            raise MismatchError(disagreement(str(link), link.ranks[0], entries[0], link.ranks[rank], entry))
    if any(entry.history != entries[0].history for entry in entries):
        yield from _find_disagreement(link)
    return entries


@functools.lru_cache(maxsize=256)
def _read(told: bytes) -> list[Entry]:
    """Return what all ranks have told; a training step tells the same again and again."""
    return [Entry(*fields) for fields in _FORMAT.iter_unpack(told)]


def _history(link: Link) -> int:
    """Return what stands for all calls until now, of a group whose ranks do not all see each other's."""
    # A later step runs when this rank may have made other calls already.
    return 0 if link.one_node or link.board is None or link.now is link.later else link.board.history


def barrier(link: Link) -> Steps:
    """Wait until every rank of a group on several nodes has come, and compare all calls that they have made.

    Raises
    ------
    MismatchError
        On every rank, if their calls differ.
    """
    history = _history(link)
    bounds = np.array([history, ~history])
    yield link.now.Iallreduce(MPI.IN_PLACE, bounds, MPI.MIN)
    if bounds[0] != ~bounds[1]:
        yield from _find_disagreement(link)


def _find_disagreement(link: Link) -> Steps:
    """Exchange the calls of all ranks, and raise on all of them, with the first on which they differ."""
    calls = link.board
    assert calls is not None
    calls.history = 0
    mine = packed(calls.recent())
    told = bytearray(len(mine) * link.size)
    yield link.later.Iallgather(mine, told)
    rows = [unpacked(bytes(told[start : start + len(mine)])) for start in range(0, len(told), len(mine))]
    for sequence in sorted(set.intersection(*map(set, rows))):
        for rank, row in enumerate(rows):
            if row[sequence].disagrees(rows[0][sequence]):
                found = row[sequence], rows[0][sequence]
                raise MismatchError(disagreement(str(link), link.ranks[0], found[1], link.ranks[rank], found[0]))
    raise MismatchError(f"the ranks of {link} made different calls long ago: none of their last {len(rows[0])} differ")


def common_segment_number(entries: list[Entry]) -> int:
    """Return the number of the segment in which the arrays of all these ranks of a node lie, or 0."""
    numbers = {entry.segment for entry in entries}
    return numbers.pop() if len(numbers) == 1 else 0


def common_segment(entries: list[Entry]) -> symmetric.Segment | None:
    """Return the segment in which the arrays of all these ranks of a node lie, or None."""
    number = common_segment_number(entries)
    return symmetric.segment(number) if number else None


def views(
    segment: symmetric.Segment, entries: list[Entry], ranks: tuple[int, ...], dtype: np.dtype[Any]
) -> list[Array]:
    """Return the arrays of all of these ranks, flat, in the order of the ranks."""
    return [segment.view(rank, entry.offset, entry.length, dtype) for rank, entry in zip(ranks, entries, strict=True)]

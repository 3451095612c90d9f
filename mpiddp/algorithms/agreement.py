"""What the ranks tell each other before they touch each other's memory: what they call, and where their arrays lie.

One all-gather of a few bytes is the barrier that such an algorithm needs anyway. After it every rank knows the same of
all, so all choose the same way, and ranks that disagree all raise the same error.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.mpi import symmetric
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import code_name, dtype_code
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

_OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")
_REDUCTIONS = {
    op.value: op
    for op in (
        *(ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
        *(ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM),
    )
}
_NO_REDUCTION = 255
_NO_ROOT = -1

# Operation, reduction, dtype and root; elements; then what may differ: segment, offset, factor.
_FORMAT = struct.Struct("<BBHiqqqd")


class Entry(NamedTuple):
    """What one rank has told."""

    operation: int
    reduction: int
    dtype: int
    root: int
    length: int
    segment: int
    offset: int
    factor: float

    def __str__(self) -> str:
        """Return the call as a person would name it."""
        details = [f"of {self.length} {code_name(self.dtype)} elements"]
        if self.reduction != _NO_REDUCTION:
            details.append(f"with {_REDUCTIONS[self.reduction].name}")
        if self.root != _NO_ROOT:
            details.append(f"and group rank {self.root} as root")
        return f"{_OPERATIONS[self.operation]} {' '.join(details)}"


def meet(
    link: Link,
    operation: str,
    x: Array,
    op: ReduceOp | None = None,
    root: int = _NO_ROOT,
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
        _NO_REDUCTION if op is None else op.value,
        dtype_code(x.dtype),
        root,
        x.size,
        segment,
        offset,
        1.0 if op is None or op.factor is None else op.factor,
    )
    told = bytearray(len(mine) * link.size)
    yield link.now.Iallgather(mine, told)
    entries = _read(bytes(told))
    first = entries[0][:5]
    for rank, entry in enumerate(entries):
        if entry[:5] != first:
            raise MismatchError(
                f"ranks of {link} disagree: rank {link.ranks[0]} calls {entries[0]}, rank {link.ranks[rank]} calls"
                f" {entry}; all ranks must call the same operations in the same order, on equal shapes and dtypes"
            )
    return entries


@functools.lru_cache(maxsize=256)
def _read(told: bytes) -> list[Entry]:
    """Return what all ranks have told; a training step tells the same again and again."""
    return [Entry(*fields) for fields in _FORMAT.iter_unpack(told)]


def common_segment(entries: list[Entry]) -> symmetric.Segment | None:
    """Return the segment in which the arrays of all these ranks of a node lie, or None."""
    number = entries[0].segment
    if not number or any(entry.segment != number for entry in entries):
        return None
    return symmetric.segment(number)


def views(
    segment: symmetric.Segment, entries: list[Entry], ranks: tuple[int, ...], dtype: np.dtype[Any]
) -> list[Array]:
    """Return the arrays of all of these ranks, flat, in the order of the ranks."""
    return [segment.view(rank, entry.offset, entry.length, dtype) for rank, entry in zip(ranks, entries, strict=True)]

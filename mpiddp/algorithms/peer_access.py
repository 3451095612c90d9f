"""How a rank reaches the arrays of all ranks of its node where they lie, between two synchronisations.

Symmetric arrays are seen as views. Ordinary ones are copied by the kernel (see `shm.cma`), piece by piece through a
buffer that stays in the cache. What is folded, who folds it and who gets the result is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpiddp.mpi.link import Channel, Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.shm import segment as symmetric
from mpiddp.shm.cma import Attachment
from mpiddp.typing import Array

from .handshake import Entry, common_segment, views
from .local_reduce import fold_rows

PIECE_BYTES = 1 << 20
"""What is copied from a rank at once. A copy has costs of its own: 16 MiB on 2 ranks took 3.5 ms by 256 KiB, 2.8 by
this, and longer pieces leave the cache."""


class Reach(Protocol):
    """The arrays of all ranks of a node."""

    def fold(
        self, op: ReduceOp, first: int, last: int, ranks: Sequence[int], size: int, factors: list[float] | None
    ) -> None:
        """Fold elements of all arrays and write the result to those of ``ranks`` (see `fold_rows`)."""

    def fold_into(
        self, op: ReduceOp, first: int, last: int, out: Array, size: int, factors: list[float] | None
    ) -> None:
        """Fold elements of all arrays into an array of this rank, which may be of the type that sums are made in."""

    def give(self, first: int, values: Array) -> None:
        """Write values to all arrays, from element ``first`` on."""

    def copy(self, rank: int, into: Array) -> None:
        """Copy the array of a rank into one of this rank."""


class InPlace:
    """Symmetric arrays."""

    def __init__(self, rows: list[Array]) -> None:
        self._rows = rows

    def fold(
        self, op: ReduceOp, first: int, last: int, ranks: Sequence[int], size: int, factors: list[float] | None
    ) -> None:
        """Do as `Reach` says: the rows are all that is read and written."""
        rows = [row[first:last] for row in self._rows]
        fold_rows(op, rows, [rows[rank] for rank in ranks], size, factors)

    def fold_into(
        self, op: ReduceOp, first: int, last: int, out: Array, size: int, factors: list[float] | None
    ) -> None:
        """Do as `Reach` says."""
        fold_rows(op, [row[first:last] for row in self._rows], (out,), size, factors)

    def give(self, first: int, values: Array) -> None:
        """Do as `Reach` says."""
        for row in self._rows:
            row[first : first + values.size] = values

    def copy(self, rank: int, into: Array) -> None:
        """Do as `Reach` says."""
        as_bytes(into)[...] = as_bytes(self._rows[rank])


class Attached:
    """Ordinary arrays.

    Parameters
    ----------
    attachment : Attachment
        What copies.
    rank : int
        This rank's place on the node.
    x : array
        Its array, flat.
    addresses : list of int
        Where the array of each rank begins, in its own process.
    """

    def __init__(self, attachment: Attachment, rank: int, x: Array, addresses: list[int]) -> None:
        self._attachment, self._rank, self._own, self._addresses = attachment, rank, x, addresses

    def _rows(self, start: int, stop: int, spare: Array) -> list[Array]:
        """Return elements of all arrays: views of this rank's, copies of the others'."""
        rows = []
        for rank, address in enumerate(self._addresses):
            row = self._own[start:stop]
            if rank != self._rank:
                row = spare[rank, : stop - start]
                self._attachment.read(rank, address + start * row.itemsize, row)
            rows.append(row)
        return rows

    def _spare(self, count: int) -> Array:
        size, dtype = len(self._addresses), self._own.dtype
        step = max(min(PIECE_BYTES // dtype.itemsize, count), 1)
        return self._attachment.buffer(size * step * dtype.itemsize).view(dtype).reshape(size, step)

    def fold(
        self, op: ReduceOp, first: int, last: int, ranks: Sequence[int], size: int, factors: list[float] | None
    ) -> None:
        """Do as `Reach` says: what others get is copied to them after each piece."""
        spare = self._spare(last - first)
        kept = self._rank if self._rank in ranks else ranks[0]
        for start in range(first, last, spare.shape[1]):
            rows = self._rows(start, min(start + spare.shape[1], last), spare)
            result = rows[kept]
            fold_rows(op, rows, (result,), size, factors)
            for rank in ranks:
                if rank != self._rank:
                    self._attachment.write(rank, self._addresses[rank] + start * result.itemsize, result)

    def fold_into(
        self, op: ReduceOp, first: int, last: int, out: Array, size: int, factors: list[float] | None
    ) -> None:
        """Do as `Reach` says."""
        spare = self._spare(last - first)
        for start in range(first, last, spare.shape[1]):
            stop = min(start + spare.shape[1], last)
            fold_rows(op, self._rows(start, stop, spare), (out[start - first : stop - first],), size, factors)

    def give(self, first: int, values: Array) -> None:
        """Do as `Reach` says."""
        for rank, address in enumerate(self._addresses):
            if rank == self._rank:
                self._own[first : first + values.size] = values
            else:
                self._attachment.write(rank, address + first * values.itemsize, values)

    def copy(self, rank: int, into: Array) -> None:
        """Do as `Reach` says."""
        if rank == self._rank:
            as_bytes(into)[...] = as_bytes(self._own)
        else:
            self._attachment.read(rank, self._addresses[rank], into)


def in_place(node: Channel, x: Array, entries: list[Entry]) -> InPlace | None:
    """Return the ranks' arrays, if all of them are symmetric and lie in one segment."""
    segment = common_segment(entries) if entries[0].segment > 0 else None
    return None if segment is None else InPlace(views(segment, entries, node.ranks, x.dtype))


def attached(link: Link, x: Array, entries: list[Entry]) -> Steps:
    """Return the arrays of the ranks of this rank's node, or None where the kernel does not copy.

    All ranks of ``link`` call, with the entries of its own node each.
    """
    if not (yield from link.attachment.prepare(link.node, link)):
        return None
    return Attached(link.attachment, link.node.rank, x.reshape(-1), [entry.offset for entry in entries])


def place_of(x: Array) -> symmetric.Place:
    """Return where ``x`` lies, for the other ranks: its place in symmetric memory, or its address."""
    place = symmetric.find(x)
    return place if place.segment else symmetric.Place(0, x.__array_interface__["data"][0])

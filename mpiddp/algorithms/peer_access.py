"""Peer access: a rank reads and writes its node's arrays in place, between two synchronisations.

Of symmetric arrays it has `Views`. Calls between nodes reach ordinary arrays by `Copies`, which the kernel makes (see
`shm.cma`) through a buffer in the cache.
"""

from __future__ import annotations

from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.segment import Location, address_of, find
from mpiddp.typing import Array

from .handshake import Entries
from .local_reduce import reduce_rows

PIECE_BYTES = 1 << 20
"""The length of a copy; longer ones leave the cache."""


class Views:
    """Access to arrays in this process's memory."""

    def __init__(self, rows: list[Array]) -> None:
        self._rows = rows

    def reduce_into(
        self, op: ReduceOp, first: int, last: int, out: Array, size: int, factors: list[float] | None
    ) -> None:
        """Reduce elements of all arrays (see `reduce_rows`)."""
        reduce_rows(op, [row[first:last] for row in self._rows], (out,), size, factors)

    def write(self, first: int, values: Array) -> None:
        """Write to all arrays, from element ``first`` on."""
        for row in self._rows:
            row[first : first + values.size] = values


class Copies:
    """Access to arrays in other processes, by the kernel."""

    def __init__(self, memory: CrossMemory, rank: int, x: Array, addresses: list[int]) -> None:
        self._memory, self._rank, self._own, self._addresses = memory, rank, x, addresses

    def _rows(self, start: int, stop: int, spare: Array) -> list[Array]:
        rows = []
        for rank, address in enumerate(self._addresses):
            row = self._own[start:stop]
            if rank != self._rank:
                row = spare[rank, : stop - start]
                self._memory.read(rank, address + start * row.itemsize, row)
            rows.append(row)
        return rows

    def _spare(self, count: int) -> Array:
        size, dtype = len(self._addresses), self._own.dtype
        step = max(min(PIECE_BYTES // dtype.itemsize, count), 1)
        return self._memory.buffer(size * step * dtype.itemsize).view(dtype).reshape(size, step)

    def reduce_into(
        self, op: ReduceOp, first: int, last: int, out: Array, size: int, factors: list[float] | None
    ) -> None:
        spare = self._spare(last - first)
        for start in range(first, last, spare.shape[1]):
            stop = min(start + spare.shape[1], last)
            reduce_rows(op, self._rows(start, stop, spare), (out[start - first : stop - first],), size, factors)

    def write(self, first: int, values: Array) -> None:
        for rank, address in enumerate(self._addresses):
            if rank == self._rank:
                self._own[first : first + values.size] = values
            else:
                self._memory.write(rank, address + first * values.itemsize, values)


PeerAccess = Views | Copies


def copied(link: Link, x: Array, entries: Entries) -> Steps:
    """Return `Copies`, or None where the kernel makes none. Collective."""
    memory = link.resource(CrossMemory)
    if not (yield from memory.prepare()):
        return None
    return Copies(memory, link.node.rank, x.reshape(-1), entries.offsets.tolist())


def place_of(x: Array) -> Location:
    """Return where ``x`` lies in symmetric memory, or else its address."""
    place = find(x)
    return place if place.segment else Location(0, address_of(x))

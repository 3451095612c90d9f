"""Peer access: a rank reads and writes its node's arrays in place, between two synchronisations.

`Views` give access to symmetric arrays. `Copies` give access to ordinary arrays: the kernel copies them (see `shm.cma`)
to and from a buffer in the cache.
"""

from collections.abc import Callable, Iterator, Sequence

from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.segment import Location, address_of, find
from mpiddp.typing import Array

from .handshake import Entries
from .local_reduce import bounds

PIECE_BYTES = 1 << 18
"""The largest piece of an array that is copied at once."""
CACHE_BYTES = 1 << 20
"""The size of all ranks' copies together, which have to stay in a core's second-level cache."""
Reduce = Callable[[Sequence[Array], Sequence[Array]], None]
"""A function that reduces rows into outputs: `reduce_rows`, bound to the reduction of one call."""


class Views:
    """Access to the ranks' arrays in memory that this process maps, such as symmetric memory."""

    def __init__(self, rows: list[Array], rank: int) -> None:
        self._rows, self._rank = rows, rank

    def reduce_into(self, reduce: Reduce, first: int, last: int, out: Array) -> None:
        """Reduce the elements ``first`` to ``last`` of all arrays into ``out``."""
        reduce([row[first:last] for row in self._rows], (out,))

    def reduce_for(self, reduce: Reduce, first: int, last: int, ranks: Sequence[int]) -> None:
        """Reduce the elements ``first`` to ``last`` of all arrays, and write the result to the arrays of ``ranks``."""
        rows = [row[first:last] for row in self._rows]
        reduce(rows, [rows[rank] for rank in ranks])

    def gather(self, blocks: Array) -> None:
        """Copy the array of each rank to the rank's block of ``blocks``."""
        for row, block in zip(self._rows, blocks, strict=True):
            block[...] = row

    def spread(self, root: int) -> None:
        """Copy root's array to this rank's; the other ranks do the same for theirs."""
        if self._rank != root:
            self._rows[self._rank][...] = self._rows[root]

    def write(self, first: int, values: Array) -> None:
        """Write ``values`` to all arrays, from element ``first`` on."""
        for row in self._rows:
            row[first : first + values.size] = values


class Copies:
    """Access to the ranks' arrays in other processes, by copies of the kernel. ``x`` is this rank's array, flat."""

    def __init__(self, memory: CrossMemory, rank: int, x: Array, addresses: list[int]) -> None:
        self._memory, self._rank, self._own, self._addresses = memory, rank, x, addresses
        self._others = [*range(rank + 1, len(addresses)), *range(rank)]
        """The other ranks, in the order in which this one reads them. Each rank begins with the next one, so that not
        all read the same memory at once."""

    def reduce_into(self, reduce: Reduce, first: int, last: int, out: Array) -> None:
        for start, rows in self._pieces(first, last):
            reduce(rows, (out[start - first : start - first + rows[0].size],))

    def reduce_for(self, reduce: Reduce, first: int, last: int, ranks: Sequence[int]) -> None:
        """Reduce elements of all arrays, and write the result to the arrays of ``ranks`` while it is in the cache."""
        for start, rows in self._pieces(first, last):
            # The result replaces this rank's row, or the copy of another rank's row.
            out = rows[self._rank if self._rank in ranks else self._rank == 0]
            reduce(rows, (out,))
            self.write(start, out, ranks)

    def gather(self, blocks: Array) -> None:
        """Copy the array of each rank to the rank's block of ``blocks``."""
        for rank in self._others:
            self.read(rank, 0, blocks[rank])
        if address_of(blocks[self._rank]) != self._addresses[self._rank]:
            blocks[self._rank][...] = self._own

    def spread(self, root: int) -> None:
        """Copy the array of one rank to those of all others.

        All ranks copy equally much: the root writes the last slice to the others, and each of these reads the rest.
        """
        cut = bounds(self._own.size, len(self._addresses), 1)[-2]
        if self._rank == root:
            self.write(cut, self._own[cut:])
        else:
            self.read(root, 0, self._own[:cut])

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, list[Array]]]:
        """Yield the start of each piece, and its rows: this rank's own elements, and copies of the other ranks'."""
        size, dtype = len(self._addresses), self._own.dtype
        step = max(min(PIECE_BYTES, CACHE_BYTES // size) // dtype.itemsize, 1)
        copies = self._memory.buffers(size, step, dtype)
        for start in range(first, last, step):
            rows = [copy[: last - start] for copy in copies]
            rows[self._rank] = self._own[start : min(start + step, last)]
            for rank in self._others:
                self.read(rank, start, rows[rank])
            yield start, rows

    def read(self, rank: int, first: int, into: Array) -> None:
        """Read elements of a rank's array, from number ``first`` on."""
        there = self._addresses[rank] + first * into.itemsize
        self._memory.read(rank, there, address_of(into), into.nbytes)

    def write(self, first: int, values: Array, ranks: Sequence[int] | None = None) -> None:
        """Write ``values`` to the arrays of all ranks, or of ``ranks``, from element number ``first`` on.

        If this rank is among them, its array has ``values`` already.
        """
        here, offset = address_of(values), first * values.itemsize
        for rank in self._others:
            if ranks is None or rank in ranks:
                self._memory.write(rank, self._addresses[rank] + offset, here, values.nbytes)


PeerAccess = Views | Copies


def copied(link: Link, x: Array, entries: Entries) -> Steps:
    """Return `Copies`, or None if the kernel does not allow cross-memory attach. Collective."""
    memory = link.resource(CrossMemory)
    if not (yield from memory.prepare()):
        return None
    return Copies(memory, link.node.rank, x.reshape(-1), entries.offsets.tolist())


def place_of(x: Array) -> Location:
    """Return where ``x`` lies in symmetric memory, or else its address."""
    place = find(x)
    return place if place.segment else Location(0, address_of(x))

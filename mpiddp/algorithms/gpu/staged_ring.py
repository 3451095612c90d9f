"""The ring on arrays of a device through pinned host memory: copies, messages and additions all at once.

The array is cut into pieces, and several rings run abreast. In each, a part of the running sum arrives in host memory,
is copied up, added to by a kernel, copied down and sent on; while one ring is on the wire another is copied, and the
copies of both directions and the kernels have a stream each. Sums are made on the device, half types in float32.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mpiddp.algorithms.local_reduce import bounds, widened
from mpiddp.algorithms.tags import Tag
from mpiddp.device import array_namespace, copies, pinned, stream
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.reduction import ReduceOp, combine, finish, is_half
from mpiddp.mpi.work import All, Awaited, Steps
from mpiddp.typing import Array

from .concurrently import abreast
from .ring import in_lanes

LANES = 4
PART_BYTES = 1 << 20
"""Longest message: long enough for the wire and the copies, short enough to have several at once."""


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    yield stream.ready(x)
    lanes = in_lanes(x, link.size, PART_BYTES, LANES)
    yield from abreast([_Lane(link, op, tag, pieces).steps() for tag, pieces in enumerate(lanes, Tag.LANE)])


class _Lane:
    """One of the rings: its pieces, one after the other, and its two host buffers."""

    def __init__(self, link: Channel, op: ReduceOp, tag: int, pieces: list[Array]) -> None:
        self._link, self._op, self._tag, self._pieces = link, op, tag, pieces
        first = pieces[0]
        self._add, self._down, self._up = (stream.side(role, first) for role in ("add", "down", "up"))
        longest = max(piece.size for piece in pieces)
        edges = bounds(longest, link.size, first.itemsize)
        elements = max(end - start for start, end in itertools.pairwise(edges))
        itemsize = np.dtype(np.float32).itemsize if is_half(first.dtype) else first.itemsize
        self._coming, self._going = pinned.take(elements * itemsize), pinned.take(elements * itemsize)

    def steps(self) -> Steps:
        for piece in self._pieces:
            edges = bounds(piece.size, self._link.size, piece.itemsize)
            parts = [piece[edges[rank] : edges[rank + 1]] for rank in range(self._link.size)]
            yield from self._reduce_around(parts)
            yield from self._gather_around(parts)
        pinned.give(self._coming)
        pinned.give(self._going)

    def _swap(self, incoming_bytes: int, outgoing_bytes: int) -> All:
        """Send what is going and receive what is coming."""
        link = self._link
        before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
        coming, going = self._coming[:incoming_bytes], self._going[:outgoing_bytes]
        return All(
            [
                link.later.Irecv([coming, MPI.BYTE], before, self._tag),
                link.later.Isend([going, MPI.BYTE], after, self._tag),
            ]
        )

    def _fetch(self, x: Array) -> stream.Mark:
        """Copy what the kernels have made of ``x`` down, to be sent."""
        stream.follow(self._down, stream.mark(self._add))
        copies.down(self._going, x, self._down)
        return stream.mark(self._down)

    def _reduce_around(self, parts: list[Array]) -> Steps:
        rank, size, op = self._link.rank, self._link.size, self._op
        xp: Any = array_namespace(parts[0])
        with stream.on(self._add):
            carried = widened(op, parts[(rank - 1) % size])
        yield self._fetch(carried)
        for step in range(2, size + 1):
            with stream.on(self._add):
                own = widened(op, parts[(rank - step) % size])
                incoming = xp.empty_like(own)
            reusable = stream.mark(self._add)  # kernels that are still queued may use the memory of incoming
            yield self._swap(incoming.nbytes, carried.nbytes)
            stream.follow(self._up, reusable)
            copies.up(incoming, self._coming, self._up)
            stream.follow(self._add, stream.mark(self._up))
            with stream.on(self._add):
                combine(op, incoming, own, incoming)
                if step == size:
                    finish(op, incoming, size)
                    parts[rank][...] = incoming
            carried = incoming
            yield self._fetch(parts[rank] if step == size else carried)

    def _gather_around(self, parts: list[Array]) -> Steps:
        rank, size = self._link.rank, self._link.size
        copied: list[Awaited] = []
        for step in range(size - 1):
            outgoing, target = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            if step >= 2:  # what came two steps ago lies where this is to come
                yield copied[step - 2]
            yield self._swap(target.nbytes, outgoing.nbytes)
            copies.up(target, self._coming, self._up)
            copied.append(stream.mark(self._up))
            self._coming, self._going = self._going, self._coming  # what has come is sent on
        yield stream.mark(self._up)

"""The ring on arrays of a device, by messages from and to its memory: for MPI libraries that cannot add there.

As `ring`, with an event wherever a kernel and a message meet. Long arrays go in pieces, several at once, so that one is
on the wire while another is added.
"""

from __future__ import annotations

from mpiddp.algorithms.local_reduce import bounds, widened
from mpiddp.algorithms.tags import Tag
from mpiddp.device import array_namespace, stream
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp, combine, finish
from mpiddp.mpi.work import All, Steps
from mpiddp.typing import Array

from .concurrently import abreast

LANES = 2
PART_BYTES = 1 << 23
"""Longest message."""


def in_lanes(x: Array, ranks: int, part_bytes: int, lanes: int) -> list[list[Array]]:
    """Cut ``x`` into pieces for rings of which several run at once, and deal them out, as on all ranks."""
    flat = x.reshape(-1)
    longest = max(part_bytes // x.itemsize, 1) * ranks
    count = min(longest, max(-(-x.size // lanes), min(longest, x.size), 1))
    pieces = [flat[start : start + count] for start in range(0, x.size, count)]
    return [pieces[lane::lanes] for lane in range(min(lanes, len(pieces)))]


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    yield stream.ready(x)
    lanes = in_lanes(x, link.size, PART_BYTES, LANES)
    yield from abreast([_rings(link, pieces, op, tag) for tag, pieces in enumerate(lanes, Tag.LANE)])


def _rings(link: Channel, pieces: list[Array], op: ReduceOp, tag: int) -> Steps:
    for piece in pieces:
        yield from _ring(link, piece, op, tag)


def _ring(link: Channel, flat: Array, op: ReduceOp, tag: int) -> Steps:
    before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
    edges = bounds(flat.size, link.size, flat.itemsize)
    parts = [flat[edges[rank] : edges[rank + 1]] for rank in range(link.size)]
    side, xp = stream.side("add", flat), array_namespace(flat)
    with stream.on(side):
        carried = widened(op, parts[before])
    for step in range(2, link.size + 1):
        with stream.on(side):
            own = widened(op, parts[(link.rank - step) % link.size])
            incoming = xp.empty_like(own)  # kernels that are still queued may use its memory
        yield stream.mark(side)
        yield All(
            [
                link.later.Irecv(movable(incoming), before, tag),
                link.later.Isend(movable(carried), after, tag),
            ]
        )
        with stream.on(side):
            combine(op, incoming, own, incoming)
        carried = incoming
    with stream.on(side):
        finish(op, carried, link.size)
        parts[link.rank][...] = carried
    yield stream.mark(side)
    for step in range(link.size - 1):
        outgoing, target = parts[(link.rank - step) % link.size], parts[(link.rank - step - 1) % link.size]
        yield All(
            [
                link.later.Irecv(movable(target), before, tag),
                link.later.Isend(movable(outgoing), after, tag),
            ]
        )

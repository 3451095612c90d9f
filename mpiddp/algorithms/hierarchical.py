"""All-reduce over several nodes: reduce in the node, across nodes slice by slice, gather in the node.

Each of n nodes sends 2 (n - 1) / n of the array's bytes, or 3 (n - 1) / n for half types, whose sums are sent in
float32. In a ring over all ranks a node with m ranks sends up to m times as much. There are as many slices as the
smallest node has ranks. The slices are sent in parallel and in pieces: one piece is sent while the result of the one
before it returns. Horovod, NCCL and Open MPI's coll/han do the same. If the ranks of some node can neither share memory
nor read each other's, all ranks reduce by the algorithm that `fallback` chooses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from mpiddp.mpi.link import Channel, Link
from mpiddp.mpi.message import movable
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import All, Awaited, Steps
from mpiddp.shm.scratch import Scratch
from mpiddp.typing import Array

from . import fallback, handshake, two_shot
from .handshake import Entries
from .local_reduce import accumulated_in, bounds, reduce_rows
from .peer_access import PeerAccess, Views, copied, place_of
from .tags import Tag

PIECE_BYTES = 1 << 20
"""The bytes of a slice that a rank sends at once. With many nodes it sends more, so that each node gets a part of at
least `_PART_BYTES`."""
_PART_BYTES = 1 << 14
"""The shortest part of a piece. In a shorter message the latency would dominate."""


def all_reduce(link: Link, call: Call, x: Array, op: ReduceOp) -> Steps:
    if link.one_node:
        yield from two_shot.all_reduce(link, call, x, op)
        return
    entries: Entries = yield from handshake.exchange(link, call, place_of(x), op)
    mine = entries.of(link.node_ranks)
    flat = x.reshape(-1)
    factors = mine.factors_of(op)
    peers: PeerAccess | None = None
    if in_place_everywhere(link, entries.segments):
        peers = Views(mine.views(link.node, x) or [flat], link.node.rank)
    elif not entries.segments.any():
        peers = yield from copied(link, x, mine)
    if peers is not None:
        yield from _where_they_lie(link, peers, flat, op, factors)
    elif (yield from link.resource(Scratch).prepare()):
        yield from _in_the_scratch(link, flat, op, factors)
    else:
        yield from fallback.reduction(x.dtype, op).all_reduce(link.after(), x, op)


def in_place_everywhere(link: Link, segments: Array) -> bool:
    """Return True if every node has all its arrays in one segment, or has a single rank."""
    by_node = segments[link.by_node]
    lowest = np.minimum.reduceat(by_node, link.node_starts)
    highest = np.maximum.reduceat(by_node, link.node_starts)
    alone = np.diff(link.node_starts, append=link.size) == 1
    return bool((alone | ((lowest == highest) & (lowest > 0))).all())


def _where_they_lie(link: Link, peers: PeerAccess, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    reduce = functools.partial(reduce_rows, op, size=link.size, factors=factors)
    across = link.across  # the ranks that have this slice on all nodes; None if this rank has no slice
    if across is not None:
        edges = bounds(x.size, link.leaders, x.itemsize)
        first, last = edges[link.node.rank], edges[link.node.rank + 1]

        def summed(start: int, stop: int) -> Array:
            sums = np.empty(stop - start, accumulated_in(x.dtype))
            peers.reduce_into(reduce, first + start, first + stop, sums)
            return sums

        def write(start: int, values: Array) -> None:
            peers.write(first + start, values)

        yield from _cross(across, x[first:last], op, summed, write)
    yield link.node.later.Ibarrier()


def _in_the_scratch(link: Link, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    scratch = link.resource(Scratch)
    step = max(scratch.buffer_bytes // x.itemsize, 1)
    for start in range(0, x.size, step):
        chunk = x[start : start + step]
        buffers = scratch.begin_round(chunk.size, x.dtype)
        mine = buffers[link.node.rank]
        mine[...] = chunk
        yield link.node.later.Ibarrier()
        yield from _where_they_lie(link, Views(buffers, link.node.rank), mine, op, factors)
        chunk[...] = mine


def _cross(
    across: Channel,
    out: Array,
    op: ReduceOp,
    summed: Callable[[int, int], Array],
    write: Callable[[int, Array], None],
) -> Steps:
    """Reduce a slice over the nodes into ``out``.

    ``summed`` returns this node's sums, in the accumulation dtype; ``write`` takes a piece's start and result.
    """
    remaining = ReduceOp.SUM if op.name in ("AVG", "PREMUL_SUM") else op
    step = max(max(PIECE_BYTES, across.size * _PART_BYTES) // out.itemsize, 1)

    def crossing(start: int) -> Steps:
        piece = out[start : start + step]
        sums = summed(start, start + piece.size)
        slices = [slice(*edges) for edges in itertools.pairwise(bounds(sums.size, across.size, sums.itemsize))]
        outgoing = [sums[part] for part in slices]  # MPI reads these until the requests are complete
        rows = [np.empty_like(outgoing[across.rank]) for _ in slices]
        rows[across.rank] = outgoing[across.rank]
        yield _messages(across, rows, outgoing)
        parts = [piece[part] for part in slices]
        reduce_rows(remaining, rows, (parts[across.rank],), 1)
        del sums, outgoing, rows
        yield _messages(across, parts, [parts[across.rank]] * across.size)
        write(start, piece)

    yield from _staggered(map(crossing, range(0, out.size, step)))


def _messages(across: Channel, incoming: list[Array], outgoing: list[Array]) -> All:
    """Receive an array from each other node, and send one to it."""
    comm, others = across.later, [rank for rank in range(across.size) if rank != across.rank]
    receives = [comm.Irecv(movable(incoming[rank]), rank, Tag.NODES) for rank in others]
    return All(receives + [comm.Isend(movable(outgoing[rank]), rank, Tag.NODES) for rank in others])


def _staggered(several: Iterator[Steps]) -> Steps:
    """Begin the steps in ``several`` one after the other.

    Each time, all that have begun before go on to their next wait, the latest first. All nodes work in this order, so
    their messages match.
    """
    waiting: list[tuple[Steps, Awaited]] = []
    while True:
        moved = [(steps, next(steps)) for steps in itertools.islice(several, 1)]
        for steps, awaited in waiting:
            yield awaited
            moved += [(steps, each) for each in itertools.islice(steps, 1)]
        if not moved:
            return
        waiting = moved

"""All-reduce over several nodes: reduce in the node, across nodes slice by slice in parallel, gather in the node.

Each node sends 2 (n - 1) / n of the array's bytes over its links, n being the number of nodes, however many ranks it
has: a ring over all ranks sends up to p times as much, depending on where they are. All ranks of a node take part in
the crossing, each with its slice; where nodes have different numbers of ranks, as many as the smallest one has.

In the node arrays are reduced where they lie (see `reach`), or in the node's scratch, or by messages where it gives no
memory. A slice crosses in pieces: while one is on the wire to be summed, the one before it is on its way back. Rows
are folded in rank order in the node and in node order across, so the bits are the same on every rank and in every run.
Half types are float32 from the first sum to the last, and are rounded once; on the way there they are twice as long.

References
----------
The scheme of Horovod's and NCCL's hierarchical all-reduce; A. Awan et al., "Optimized broadcast for deep learning
workloads on dense-GPU clusters", and Open MPI's coll/han.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiddp.faults.calls import comparing
from mpiddp.mpi import message
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel, Link
from mpiddp.mpi.message import as_bytes, movable
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import All, Steps
from mpiddp.shm.segment import Scratch
from mpiddp.typing import Array

from . import exchange
from .handshake import Entry, common_segment_number, meet
from .local_reduce import accumulated_in, bounds, fold_rows
from .peer_access import InPlace, Reach, attached, in_place, place_of
from .tags import Tag

PIECE_BYTES = 1 << 20
"""What a rank sends to all others at once."""


@comparing
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    entries: list[Entry] = yield from meet(link, "all_reduce", x, op, place=place_of(x))
    nodes: dict[int, list[Entry]] = {}
    for entry, node in zip(entries, link.nodes, strict=True):
        nodes.setdefault(node, []).append(entry)
    mine, flat = nodes[link.nodes[link.rank]], x.reshape(-1)
    factors = None if op.factor is None else [entry.factor for entry in mine]
    reach: Reach | None = None
    if all(len(told) == 1 or common_segment_number(told) > 0 for told in nodes.values()):
        reach = InPlace([flat]) if len(mine) == 1 else in_place(link.node, x, mine)
    elif not any(entry.segment for entry in entries):
        reach = yield from attached(link, x, mine)
    if reach is not None:
        yield from _where_they_lie(link, reach, flat, op, factors)
    elif (yield from link.scratch.prepare(link.node, link)):
        yield from _in_the_scratch(link, flat, op, factors)
    else:
        yield from _by_messages(link, x, op)


def _others(link: Link) -> Channel | None:
    """Return the ranks that have the same slice: this one alone where there is one node, none where it has no slice."""
    if link.one_node:
        return Channel(link.ranks[link.rank : link.rank + 1], 0, link.now, link.later)
    return link.across


def _where_they_lie(link: Link, reach: Reach, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    """Reduce arrays that this rank reaches on its node."""
    across = _others(link)
    if across is not None:
        edges = bounds(x.size, link.places, x.itemsize)
        first, last = edges[link.node.rank], edges[link.node.rank + 1]

        def summed(start: int, stop: int) -> Array:
            sums = np.empty(stop - start, accumulated_in(x.dtype))
            reach.fold_into(op, first + start, first + stop, sums, link.size, factors)
            return sums

        def give(start: int, values: Array) -> None:
            reach.give(first + start, values)

        yield from _across(across, x[first:last], op, summed, give)
    yield link.node.later.Ibarrier()


def _in_the_scratch(link: Link, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    """Reduce arrays that lie anywhere: each piece of them where it is copied to."""
    step = max(Scratch.PIECE_BYTES // x.itemsize, 1)
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        slots = link.scratch.turn(piece.size, x.dtype)
        slots[link.node.rank][...] = piece
        yield link.node.later.Ibarrier()
        mine = slots[link.node.rank]
        yield from _where_they_lie(link, InPlace(slots), mine, op, factors)
        piece[...] = mine


def _by_messages(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce arrays where nodes share no memory."""
    if x.nbytes > message.MAX_COUNT and x.size > 1:
        yield from exchange.in_turn(lambda _, piece: _by_messages(link, piece, op), link, x)
        return
    across = _others(link)
    sizes = exchange.slice_sizes(x, link.places) + [0] * (link.node.size - link.places)
    sums: Array = yield from exchange.reduce_slices(link.node.after(), x, op, sizes, link.size)
    mine = np.empty(sums.size, x.dtype)
    if across is not None:
        yield from _across(across, mine, op, lambda start, stop: sums[start:stop], lambda start, values: None)
    yield link.node.later.Iallgatherv(as_bytes(mine), (as_bytes(x), sizes, None, MPI.BYTE))


class _Crossing:
    """A piece of a slice on its way across: to be summed, and back.

    Parameters
    ----------
    across : Channel
        The ranks that have the same slice.
    sums : array
        What this node has summed of the piece.
    out : array
        Where the result is put.
    op : ReduceOp
        What remains to be done.
    """

    def __init__(self, across: Channel, sums: Array, out: Array, op: ReduceOp) -> None:
        self._across, self._out, self._op = across, out, op
        self._edges = bounds(sums.size, across.size, sums.itemsize)
        self._rows = [np.empty(self._part(across.rank).size, sums.dtype) for _ in range(across.size)]
        self._rows[across.rank] = self._part(across.rank, sums)
        self._sums = sums  # on the wire until the requests are complete
        self._requests = self._post(self._rows, [self._part(rank, sums) for rank in range(across.size)])

    def _part(self, rank: int, x: Array | None = None) -> Array:
        """Return what a rank sums of the piece, or of what is laid out like it."""
        return (self._out if x is None else x)[self._edges[rank] : self._edges[rank + 1]]

    def _post(self, incoming: list[Array], outgoing: list[Array]) -> list[MPI.Request]:
        """Exchange arrays with all other nodes."""
        comm = self._across.later
        others = [rank for rank in range(self._across.size) if rank != self._across.rank]
        received = [comm.Irecv(movable(incoming[rank]), rank, Tag.NODES) for rank in others]
        return received + [comm.Isend(movable(outgoing[rank]), rank, Tag.NODES) for rank in others]

    def reduce(self) -> Steps:
        """Sum this node's part of the piece, and send it to the others."""
        yield All(self._requests)
        mine = self._part(self._across.rank)
        fold_rows(self._op, self._rows, (mine,), 1)
        parts = [self._part(rank) for rank in range(self._across.size)]
        self._requests = self._post(parts, [mine] * self._across.size)

    def gather(self) -> Steps:
        """Wait for the others' parts, and return the piece."""
        yield All(self._requests)
        return self._out


def _across(
    across: Channel,
    out: Array,
    op: ReduceOp,
    summed: Callable[[int, int], Array],
    give: Callable[[int, Array], None],
) -> Steps:
    """Reduce a slice over the nodes into ``out``.

    Parameters
    ----------
    summed : callable
        Returns what this node has summed of elements ``start`` to ``stop``, in the type that sums are made in.
    give : callable
        Is given each piece of the result, and where it begins.
    """
    remaining = ReduceOp.SUM if op.name in ("AVG", "PREMUL_SUM") else op
    step = max(PIECE_BYTES // out.itemsize, 1)
    starts = range(0, out.size, step)
    pieces: list[_Crossing] = []
    # All ranks post in this order, so that messages meet.
    for turn in range(len(starts) + 2):
        if turn < len(starts):
            start = starts[turn]
            stop = min(start + step, out.size)
            pieces.append(_Crossing(across, summed(start, stop), out[start:stop], remaining))
        if 1 <= turn <= len(starts):
            yield from pieces[turn - 1].reduce()
        if turn >= 2:
            values = yield from pieces[turn - 2].gather()
            give(starts[turn - 2], values)

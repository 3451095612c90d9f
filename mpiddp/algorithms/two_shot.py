"""Collectives in the shared memory of a node: every rank folds its slice over all ranks' arrays and writes it to all.

Symmetric arrays are worked on where they lie: a barrier, the slice, a barrier. Each byte is read once and written once
by somebody, so an all-reduce costs about one copy of the array. Ordinary arrays pass in pieces through a scratch that
stays in the cache, with one barrier a piece: while the ranks fold a piece, the one before it is taken out. The barriers
are MPI's, never flags to spin on: a flag does not see a death.

All bits are the same on every rank and in every run: rows are folded in rank order.

References
----------
The two shots (reduce-scatter, then all-gather, by loads and stores) are those of the all-reduce in PyTorch's symmetric
memory and NVIDIA's TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.mpi.board import comparing
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.symmetric import Scratch
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import messages, native
from .agreement import Entry, common_segment, meet, views
from .folding import bounds, fold_rows

Pass = Callable[[int, int, list[Array]], None]
"""Does something with elements ``start`` to ``stop`` of an array and the slots of all ranks."""


def _factors(op: ReduceOp, entries: list[Entry]) -> list[float] | None:
    """Return each rank's factor, where the operation has one: they may differ."""
    return None if op.factor is None else [entry.factor for entry in entries]


def _in_pieces(
    link: Link, like: Array, length: int, rows: int, put: Pass, take: Pass, collect: Pass | None = None
) -> Steps:
    """Let ``length`` elements pass through the scratch, ``rows`` of them side by side.

    ``put`` writes to this rank's slot, ``take`` reads from all slots after a barrier, and may write to slots; what it
    has written ``collect`` reads after another one.
    """
    step = max(Scratch.PIECE_BYTES // like.itemsize // rows, 1)
    before: tuple[int, int, list[Array]] | None = None
    for start in range(0, length, step):
        stop = min(start + step, length)
        piece = (start, stop, link.scratch.turn(rows * (stop - start), like.dtype))
        put(*piece)
        yield link.later.Ibarrier()
        if before is not None and collect is not None:
            collect(*before)
        take(*piece)
        before = piece
    if before is not None and collect is not None:
        link.scratch.turn(0, like.dtype)
        yield link.later.Ibarrier()
        collect(*before)


@comparing
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    entries = yield from meet(link, "all_reduce", x, op)
    segment = common_segment(entries)
    factors = _factors(op, entries)
    if segment is not None:
        edges = bounds(x.size, link.size, x.itemsize)
        mine = slice(edges[link.rank], edges[link.rank + 1])
        rows = [row[mine] for row in views(segment, entries, link.ranks, x.dtype)]
        fold_rows(op, rows, rows, link.size, factors)
        yield link.later.Ibarrier()
    elif (yield from link.scratch.prepare(link)):
        yield from _all_reduce_in_pieces(link, x.reshape(-1), None, op, factors)
    else:
        yield from messages.reduction(x.dtype, op).all_reduce(link.after(), x, op)


def _all_reduce_in_pieces(link: Link, x: Array, root: int | None, op: ReduceOp, factors: list[float] | None) -> Steps:
    """Reduce ``x`` into that of ``root``, or of all where it is None."""
    gets_result = root is None or link.rank == root

    def put(start: int, stop: int, slots: list[Array]) -> None:
        edges = bounds(stop - start, link.size, x.itemsize)
        mine = slots[link.rank]
        first, last = edges[link.rank], edges[link.rank + 1]
        mine[:first] = x[start : start + first]
        mine[last : stop - start] = x[start + last : stop]

    def fold(start: int, stop: int, slots: list[Array]) -> None:
        edges = bounds(stop - start, link.size, x.itemsize)
        first, last = edges[link.rank], edges[link.rank + 1]
        rows = [slot[first:last] for slot in slots]
        here = slots[link.rank][first:last]
        own = rows[link.rank] = x[start + first : start + last]
        fold_rows(op, rows, (own, here) if gets_result else (here,), link.size, factors)

    def collect(start: int, stop: int, slots: list[Array]) -> None:
        if not gets_result:
            return
        edges = bounds(stop - start, link.size, x.itemsize)
        for rank, slot in enumerate(slots):
            if rank != link.rank:
                first, last = edges[rank], edges[rank + 1]
                x[start + first : start + last] = slot[first:last]

    yield from _in_pieces(link, x, x.size, 1, put, fold, collect)


@comparing
def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    entries = yield from meet(link, "reduce", x, op, root)
    segment = common_segment(entries)
    factors = _factors(op, entries)
    if segment is not None:
        edges = bounds(x.size, link.size, x.itemsize)
        mine = slice(edges[link.rank], edges[link.rank + 1])
        rows = [row[mine] for row in views(segment, entries, link.ranks, x.dtype)]
        fold_rows(op, rows, (rows[root],), link.size, factors)
        yield link.later.Ibarrier()
    elif (yield from link.scratch.prepare(link)):
        yield from _all_reduce_in_pieces(link, x.reshape(-1), root, op, factors)
    else:
        yield from messages.reduction(x.dtype, op).reduce(link.after(), x, root, op)


@comparing
def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    entries = yield from meet(link, "reduce_scatter", x, op)
    segment = common_segment(entries)
    factors = _factors(op, entries)
    length, result = output.size, output.reshape(-1)
    first = link.rank * length
    if segment is not None:
        rows = [row[first : first + length] for row in views(segment, entries, link.ranks, x.dtype)]
        fold_rows(op, rows, (result,), link.size, factors)
        yield link.later.Ibarrier()
        return
    if not (yield from link.scratch.prepare(link)):
        yield from messages.reduction(x.dtype, op).reduce_scatter(link.after(), output, x, op)
        return
    blocks = x.reshape(link.size, length)

    def put(start: int, stop: int, slots: list[Array]) -> None:
        width = stop - start
        for rank in range(link.size):
            if rank != link.rank:
                slots[link.rank][rank * width : (rank + 1) * width] = blocks[rank, start:stop]

    def fold(start: int, stop: int, slots: list[Array]) -> None:
        width = stop - start
        rows = [slot[link.rank * width : (link.rank + 1) * width] for slot in slots]
        rows[link.rank] = blocks[link.rank, start:stop]
        fold_rows(op, rows, (result[start:stop],), link.size, factors)

    yield from _in_pieces(link, x, length, link.size, put, fold)


@comparing
def all_gather(link: Link, output: Array, x: Array) -> Steps:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    entries = yield from meet(link, "all_gather", x)
    segment = common_segment(entries)
    source = as_bytes(x)
    blocks = as_bytes(output).reshape(link.size, -1)
    if segment is not None:
        for rank, row in enumerate(views(segment, entries, link.ranks, x.dtype)):
            blocks[rank] = as_bytes(row)
        yield link.later.Ibarrier()
        return
    if not (yield from link.scratch.prepare(link)):
        yield from native.all_gather(link.after(), output, x)
        return

    def put(start: int, stop: int, slots: list[Array]) -> None:
        slots[link.rank][: stop - start] = source[start:stop]

    def take(start: int, stop: int, slots: list[Array]) -> None:
        for rank, slot in enumerate(slots):
            blocks[rank, start:stop] = source[start:stop] if rank == link.rank else slot[: stop - start]

    yield from _in_pieces(link, source, source.size, 1, put, take)


@comparing
def broadcast(link: Link, x: Array, root: int) -> Steps:
    """Copy root's ``x`` to all ranks.

    Ordinary arrays go by MPI's own algorithm: through the scratch it would be one more copy for everybody.
    """
    entries = yield from meet(link, "broadcast", x, root=root)
    segment = common_segment(entries)
    if segment is None:
        yield from native.broadcast(link.after(), x, root)
        return
    if link.rank != root:
        as_bytes(x)[...] = as_bytes(segment.view(link.ranks[root], entries[root].offset, x.size, x.dtype))
    yield link.later.Ibarrier()


__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]

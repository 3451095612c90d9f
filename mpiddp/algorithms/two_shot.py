"""Collectives in the memory of a node: every rank folds its slice over all ranks' arrays and writes it to all.

Where the arrays lie decides how, when the ranks have met:

- Symmetric arrays, but short ones, are worked on in place: a barrier, the slice, a barrier. Each byte is read once and
  written once by somebody, so an all-reduce costs about one copy of the array.
- Long ordinary arrays are too, by copies that the kernel makes (see `reach`).
- Others pass in pieces through a scratch (see `passage`). Two ranks, and short arrays of any number, need one shot
  only: everybody folds all of it. So do broadcast, all-gather and reduce-scatter.

The barriers are MPI's, never flags to spin on: a flag does not see a death. All bits are the same on every rank and in
every run: rows are folded in rank order.

References
----------
The two shots (reduce-scatter, then all-gather, by loads and stores) are those of the all-reduce in PyTorch's symmetric
memory and NVIDIA's TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, comparing
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.shm.cma import address_of
from mpiddp.shm.scratch import Passage
from mpiddp.shm.segment import NOWHERE, Place, find
from mpiddp.typing import Array

from . import fallback, native
from .handshake import Entry, meet
from .local_reduce import bounds, fold_rows
from .peer_access import Reach, attached, in_place, place_of

ATTACH_BYTES = 1 << 22
"""Longer ordinary arrays are copied by the kernel: below, its costs are more than the copies that it saves."""
ONE_SHOT_BYTES = 1 << 17
"""Shorter arrays go through the scratch, symmetric ones too, and are reduced in one shot by any number of ranks: that
takes a barrier less. Longer ones of more than two ranks are reduced in two: everybody has less to read."""
_ONE_SHOT_PIECE_BYTES = 1 << 20
_BEGUN = Place(-1, 0)
"""Where an array lies whose first piece is in the scratch."""


class _Met(NamedTuple):
    """What the ranks know when they have met."""

    entries: list[Entry]
    reach: Reach | None
    """The arrays of all ranks, where this rank reaches them."""
    begun: bool
    """Whether all have put their first piece into the scratch."""


def _meet(
    link: Link, passage: Passage, operation: str, x: Array, op: ReduceOp | None = None, root: int = NO_ROOT
) -> Steps:
    """Wait until every rank has come to this operation, and return how they go on; None if by messages."""
    long = x.nbytes > ATTACH_BYTES
    place = place_of(x) if long else NOWHERE if x.nbytes <= ONE_SHOT_BYTES else find(x)
    if not place.segment and (not long or link.attachment.fault) and passage.begin():
        place = _BEGUN
    entries = yield from meet(link, operation, x, op, root, place)
    kinds = [entry.segment for entry in entries]
    if kinds.count(_BEGUN.segment) == link.size:
        return _Met(entries, None, True)
    reach = in_place(link, x, entries)
    if reach is None and long and max(kinds) == 0 == min(kinds):
        reach = yield from attached(link, x, entries)
    if reach is None and not (yield from link.scratch.prepare(link, link)):
        return None
    return _Met(entries, reach, False)


def _factors(op: ReduceOp, entries: list[Entry]) -> list[float] | None:
    """Return each rank's factor, where the operation has one: they may differ."""
    return None if op.factor is None else [entry.factor for entry in entries]


@comparing
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    if not (yield from _reduce(link, "all_reduce", x, op, NO_ROOT)):
        yield from fallback.reduction(x.dtype, op).all_reduce(link.after(), x, op)


@comparing
def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    if not (yield from _reduce(link, "reduce", x, op, root)):
        yield from fallback.reduction(x.dtype, op).reduce(link.after(), x, root, op)


def _reduce(link: Link, operation: str, x: Array, op: ReduceOp, root: int) -> Steps:
    """Reduce ``x`` into that of ``root``, or of all ranks, and tell whether there was memory for it."""
    factors: list[float] | None = None
    gets_result = root in (NO_ROOT, link.rank)
    flat = x.reshape(-1)

    def put_all(start: int, stop: int, slots: list[Array]) -> None:
        if root != link.rank:
            slots[link.rank][...] = flat[start:stop]

    def fold_all(start: int, stop: int, slots: list[Array]) -> None:
        if gets_result:
            rows = list(slots)
            rows[link.rank] = flat[start:stop]
            fold_rows(op, rows, (rows[link.rank],), link.size, factors)

    def put(start: int, stop: int, slots: list[Array]) -> None:
        first, last = _own_slice(link, start, stop, x)
        mine = slots[link.rank]
        mine[: first - start] = flat[start:first]
        mine[last - start :] = flat[last:stop]

    def fold(start: int, stop: int, slots: list[Array]) -> None:
        first, last = _own_slice(link, start, stop, x)
        rows = [slot[first - start : last - start] for slot in slots]
        here = rows[link.rank]
        own = rows[link.rank] = flat[first:last]
        fold_rows(op, rows, (own, here) if gets_result else (here,), link.size, factors)

    def collect(start: int, stop: int, slots: list[Array]) -> None:
        if gets_result:
            edges = bounds(stop - start, link.size, x.itemsize)
            for rank, slot in enumerate(slots):
                if rank != link.rank:
                    flat[start + edges[rank] : start + edges[rank + 1]] = slot[edges[rank] : edges[rank + 1]]

    if link.size == 2 or x.nbytes <= ONE_SHOT_BYTES:
        passage = Passage(link, x, x.size, put_all, fold_all, piece_bytes=_ONE_SHOT_PIECE_BYTES)
    else:
        passage = Passage(link, x, x.size, put, fold, collect)
    met: _Met | None = yield from _meet(link, passage, operation, x, op, root)
    if met is None:
        return False
    factors = _factors(op, met.entries)
    if met.reach is None:
        yield from passage.run(met.begun)
    else:
        edges = bounds(x.size, link.size, x.itemsize)
        to = range(link.size) if root == NO_ROOT else (root,)
        met.reach.fold(op, edges[link.rank], edges[link.rank + 1], to, link.size, factors)
        yield link.later.Ibarrier()
    return True


def _own_slice(link: Link, start: int, stop: int, x: Array) -> tuple[int, int]:
    """Return which of the elements ``start`` to ``stop`` this rank folds."""
    edges = bounds(stop - start, link.size, x.itemsize)
    return start + edges[link.rank], start + edges[link.rank + 1]


def _lies_in_others(part: Array, whole: Array, rank: int) -> bool:
    """Tell whether an array shares memory with other blocks of one of such blocks than that of ``rank``.

    Its own block may be read and written where it is, as it is nobody else's concern.
    """
    return np.may_share_memory(part, whole) and address_of(part) != address_of(whole) + rank * part.nbytes


@comparing
def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    if _lies_in_others(output, x, link.rank):
        apart = np.empty_like(output)
        yield from reduce_scatter(link, apart, x, op)
        output[...] = apart
        return
    factors: list[float] | None = None
    length, result = output.size, output.reshape(-1)
    blocks = x.reshape(link.size, length)

    def put(start: int, stop: int, slots: list[Array]) -> None:
        rows = slots[link.rank].reshape(link.size, stop - start)
        for rank in range(link.size):
            if rank != link.rank:
                rows[rank] = blocks[rank, start:stop]

    def fold(start: int, stop: int, slots: list[Array]) -> None:
        rows = [slot.reshape(link.size, stop - start)[link.rank] for slot in slots]
        rows[link.rank] = blocks[link.rank, start:stop]
        fold_rows(op, rows, (result[start:stop],), link.size, factors)

    passage = Passage(link, x, length, put, fold, rows=link.size)
    met: _Met | None = yield from _meet(link, passage, "reduce_scatter", x, op)
    if met is None:
        yield from fallback.reduction(x.dtype, op).reduce_scatter(link.after(), output, x, op)
        return
    factors = _factors(op, met.entries)
    if met.reach is None:
        yield from passage.run(met.begun)
    else:
        met.reach.fold_into(op, link.rank * length, (link.rank + 1) * length, result, link.size, factors)
        yield link.later.Ibarrier()


@comparing
def all_gather(link: Link, output: Array, x: Array) -> Steps:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    if _lies_in_others(x, output, link.rank):
        x = x.copy()
    source = as_bytes(x)
    blocks = as_bytes(output).reshape(link.size, -1)

    def take(start: int, stop: int, slots: list[Array]) -> None:
        for rank, slot in enumerate(slots):
            blocks[rank, start:stop] = source[start:stop] if rank == link.rank else slot

    passage = Passage(link, source, source.size, _putting(link, source), take)
    met: _Met | None = yield from _meet(link, passage, "all_gather", x)
    if met is None:
        yield from native.all_gather(link.after(), output, x)
    elif met.reach is None:
        yield from passage.run(met.begun)
    else:
        for rank, block in enumerate(blocks):
            met.reach.copy(rank, block)
        yield link.later.Ibarrier()


@comparing
def broadcast(link: Link, x: Array, root: int) -> Steps:
    """Copy root's ``x`` to all ranks."""
    target = as_bytes(x)

    def put(start: int, stop: int, slots: list[Array]) -> None:
        if link.rank == root:
            slots[root][...] = target[start:stop]

    def take(start: int, stop: int, slots: list[Array]) -> None:
        if link.rank != root:
            target[start:stop] = slots[root]

    passage = Passage(link, target, target.size, put, take)
    met: _Met | None = yield from _meet(link, passage, "broadcast", x, root=root)
    if met is None:
        yield from native.broadcast(link.after(), x, root)
    elif met.reach is None:
        yield from passage.run(met.begun)
    else:
        if link.rank != root:
            met.reach.copy(root, x)
        yield link.later.Ibarrier()


def _putting(link: Link, source: Array) -> Callable[[int, int, list[Array]], None]:
    """Return what puts pieces of ``source`` into this rank's slot."""

    def put(start: int, stop: int, slots: list[Array]) -> None:
        slots[link.rank][...] = source[start:stop]

    return put


__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]

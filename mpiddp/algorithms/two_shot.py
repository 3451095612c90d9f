"""Two shots in a node's memory: every rank reduces its slice over all ranks' arrays and writes it to all.

After the handshake the arrays' places decide:

- Symmetric arrays, unless short, are reduced in place, at about the cost of one copy.
- Others pass through a scratch in chunks; for two ranks and for short arrays in one shot: every rank reduces all.
  Copies by the kernel, from one process to another, save a copy and were not faster.

The barriers are MPI's: a flag to spin on does not see a failure. Reference: the two shots of PyTorch's symmetric memory
and NVIDIA's TensorRT-LLM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, compares_calls
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.shm.scratch import Pipeline, Scratch
from mpiddp.shm.segment import NOWHERE, Location, address_of, find
from mpiddp.typing import Array

from . import fallback, handshake, native
from .handshake import Entries
from .local_reduce import bounds, reduce_rows
from .peer_access import Views, in_place

ONE_SHOT_BYTES = 1 << 17
"""One shot saves a barrier; in two, more than two ranks read less."""
_BEGUN = Location(-1, 0)


class _Access(NamedTuple):
    entries: Entries
    peers: Views | None
    """None: through the scratch."""
    begun: bool = False
    """All first chunks are in the scratch."""


def _meet(
    link: Link, pipeline: Pipeline, operation: str, x: Array, op: ReduceOp | None = None, root: int = NO_ROOT
) -> Steps:
    place = NOWHERE if x.nbytes <= ONE_SHOT_BYTES else find(x)
    if not place.segment and pipeline.begin():
        place = _BEGUN
    entries: Entries = yield from handshake.exchange(link, operation, x, place, op, root)
    if entries.segment == _BEGUN.segment:
        return _Access(entries, None, begun=True)
    peers = in_place(link, x, entries)
    if peers is None and not (yield from link.resource(Scratch).prepare()):
        return None
    return _Access(entries, peers)


@compares_calls
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    if not (yield from _reduce(link, "all_reduce", x, op, NO_ROOT)):
        yield from fallback.reduction(x.dtype, op).all_reduce(link.after(), x, op)


@compares_calls
def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    if not (yield from _reduce(link, "reduce", x, op, root)):
        yield from fallback.reduction(x.dtype, op).reduce(link.after(), x, root, op)


def _reduce(link: Link, operation: str, x: Array, op: ReduceOp, root: int) -> Steps:
    """Reduce into root's or, without a root, all ranks' ``x``; return False without shared memory."""
    factors: list[float] | None = None
    gets_result = root in (NO_ROOT, link.rank)
    flat = x.reshape(-1)

    def put_all(start: int, stop: int, buffers: list[Array]) -> None:
        if root != link.rank:
            buffers[link.rank][...] = flat[start:stop]

    def reduce_all(start: int, stop: int, buffers: list[Array]) -> None:
        if gets_result:
            rows = list(buffers)
            rows[link.rank] = flat[start:stop]
            reduce_rows(op, rows, (rows[link.rank],), link.size, factors)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        first, last = _own_slice(link, start, stop, x)
        mine = buffers[link.rank]
        mine[: first - start] = flat[start:first]
        mine[last - start :] = flat[last:stop]

    def reduce_slice(start: int, stop: int, buffers: list[Array]) -> None:
        first, last = _own_slice(link, start, stop, x)
        rows = [buffer[first - start : last - start] for buffer in buffers]
        here = rows[link.rank]
        own = rows[link.rank] = flat[first:last]
        reduce_rows(op, rows, (own, here) if gets_result else (here,), link.size, factors)

    def collect(start: int, stop: int, buffers: list[Array]) -> None:
        if gets_result:
            edges = bounds(stop - start, link.size, x.itemsize)
            for rank, buffer in enumerate(buffers):
                if rank != link.rank:
                    flat[start + edges[rank] : start + edges[rank + 1]] = buffer[edges[rank] : edges[rank + 1]]

    if link.size == 2 or x.nbytes <= ONE_SHOT_BYTES:
        pipeline = Pipeline(link, x, x.size, put_all, reduce_all)
    else:
        pipeline = Pipeline(link, x, x.size, put, reduce_slice, collect)
    found: _Access | None = yield from _meet(link, pipeline, operation, x, op, root)
    if found is None:
        return False
    factors = found.entries.factors_of(op)
    if found.peers is None:
        yield from pipeline.run(found.begun)
    else:
        first, last = _own_slice(link, 0, x.size, x)
        to = range(link.size) if root == NO_ROOT else (root,)
        found.peers.reduce(op, first, last, to, link.size, factors)
        yield link.later.Ibarrier()
    return True


def _own_slice(link: Link, start: int, stop: int, x: Array) -> tuple[int, int]:
    edges = bounds(stop - start, link.size, x.itemsize)
    return start + edges[link.rank], start + edges[link.rank + 1]


def _lies_in_others(part: Array, whole: Array, rank: int) -> bool:
    """Return True if ``part`` shares memory with others' blocks of ``whole``."""
    return np.may_share_memory(part, whole) and address_of(part) != address_of(whole) + rank * part.nbytes


@compares_calls
def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    if _lies_in_others(output, x, link.rank):
        apart = np.empty_like(output)
        yield from reduce_scatter(link, apart, x, op)
        output[...] = apart
        return
    factors: list[float] | None = None
    length, result = output.size, output.reshape(-1)
    blocks = x.reshape(link.size, length)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        rows = buffers[link.rank].reshape(link.size, stop - start)
        for rank in range(link.size):
            if rank != link.rank:
                rows[rank] = blocks[rank, start:stop]

    def reduce_slice(start: int, stop: int, buffers: list[Array]) -> None:
        rows = [buffer.reshape(link.size, stop - start)[link.rank] for buffer in buffers]
        rows[link.rank] = blocks[link.rank, start:stop]
        reduce_rows(op, rows, (result[start:stop],), link.size, factors)

    pipeline = Pipeline(link, x, length, put, reduce_slice, rows=link.size)
    found: _Access | None = yield from _meet(link, pipeline, "reduce_scatter", x, op)
    if found is None:
        yield from fallback.reduction(x.dtype, op).reduce_scatter(link.after(), output, x, op)
        return
    factors = found.entries.factors_of(op)
    if found.peers is None:
        yield from pipeline.run(found.begun)
    else:
        found.peers.reduce_into(op, link.rank * length, (link.rank + 1) * length, result, link.size, factors)
        yield link.later.Ibarrier()


@compares_calls
def all_gather(link: Link, output: Array, x: Array) -> Steps:
    if _lies_in_others(x, output, link.rank):
        x = x.copy()
    source = as_bytes(x)
    blocks = as_bytes(output).reshape(link.size, -1)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        buffers[link.rank][...] = source[start:stop]

    def take(start: int, stop: int, buffers: list[Array]) -> None:
        for rank, buffer in enumerate(buffers):
            blocks[rank, start:stop] = source[start:stop] if rank == link.rank else buffer

    pipeline = Pipeline(link, source, source.size, put, take)
    found: _Access | None = yield from _meet(link, pipeline, "all_gather", x)
    if found is None:
        yield from native.all_gather(link.after(), output, x)
    elif found.peers is None:
        yield from pipeline.run(found.begun)
    else:
        for rank, block in enumerate(blocks):
            found.peers.copy(rank, block)
        yield link.later.Ibarrier()


@compares_calls
def broadcast(link: Link, x: Array, root: int) -> Steps:
    target = as_bytes(x)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        if link.rank == root:
            buffers[root][...] = target[start:stop]

    def take(start: int, stop: int, buffers: list[Array]) -> None:
        if link.rank != root:
            target[start:stop] = buffers[root]

    pipeline = Pipeline(link, target, target.size, put, take)
    found: _Access | None = yield from _meet(link, pipeline, "broadcast", x, root=root)
    if found is None:
        yield from native.broadcast(link.after(), x, root)
    elif found.peers is None:
        yield from pipeline.run(found.begun)
    else:
        if link.rank != root:
            found.peers.copy(root, x)
        yield link.later.Ibarrier()

"""All-reduce of device arrays over several nodes: by shared memory in a node, and by rings across nodes."""

from __future__ import annotations

import numpy as np

from mpiddp.algorithms import handshake
from mpiddp.algorithms.handshake import Entries
from mpiddp.algorithms.hierarchical import in_place_everywhere
from mpiddp.algorithms.local_reduce import accumulated_in, bounds
from mpiddp.device import array_namespace, kernels, stream, transfer
from mpiddp.mpi import p2p_device
from mpiddp.mpi.link import Channel, Link
from mpiddp.mpi.reduction import ReduceOp, combining
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import cuda_ipc, ring, staged_ring
from . import scratch as staging
from .scratch import DeviceScratch


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    ready = stream.ready(x)
    entries: Entries = yield from handshake.exchange(link, "all_reduce", x, cuda_ipc.find(x), op)
    mine, flat = entries.of(link.node_ranks), x.reshape(-1)
    factors = mine.factors_of(op)
    yield ready
    if np.diff(link.node_starts, append=link.size).max() > kernels.MOST_ROWS:
        yield from _around(link, x, op)
    elif in_place_everywhere(link, entries.segments):
        yield from _reduce(link, _where_they_lie(link, flat, mine), op, factors)
    elif (yield from link.resource(DeviceScratch).prepare(x)):
        yield from link.resource(DeviceScratch).passing(x, lambda piece: _in_pieces(link, piece, op, factors))
    else:
        yield from _around(link, x, op)


def _around(ranks: Channel, x: Array, op: ReduceOp) -> Steps:
    return ring.all_reduce(ranks, x, op) if p2p_device.by_address else staged_ring.all_reduce(ranks, x, op)


def _where_they_lie(link: Link, x: Array, entries: Entries) -> list[Array]:
    if link.node.size == 1:
        return [x]
    segment = cuda_ipc.segment(entries.common_segment())
    assert segment is not None, "in place everywhere"
    return entries.views(segment, link.node.ranks, x.size, x.dtype)


def _in_pieces(link: Link, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    scratch, down = link.resource(DeviceScratch), stream.side("down", x)
    step = max(staging.PIECE_BYTES // x.itemsize, 1)
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        buffers = scratch.begin_round(piece.size, x.dtype)
        transfer.across(buffers[link.node.rank], piece, down)
        yield stream.mark(down)
        yield from _reduce(link, buffers, op, factors)
        transfer.across(piece, buffers[link.node.rank], down)
    yield stream.mark(down)


def _reduce(link: Link, rows: list[Array], op: ReduceOp, factors: list[float] | None) -> Steps:
    like, across = rows[link.node.rank], link.across
    yield link.node.later.Ibarrier()
    if across is not None:
        edges = bounds(like.size, link.places, like.itemsize)
        slices = [row[edges[link.node.rank] : edges[link.node.rank + 1]] for row in rows]
        side, dtype = stream.side("add", like), accumulated_in(like.dtype)
        with stream.on(side):
            sums = array_namespace(like).empty(slices[0].size, dtype)
        kernels.fold(combining(op), slices, [sums], side, factors=factors)
        yield stream.mark(side)
        remaining = ReduceOp.SUM if op.name in ("AVG", "PREMUL_SUM") else op
        yield from _around(across, sums, remaining)
        kernels.fold(combining(op), [sums], slices, side, divisor=link.size if op.name == "AVG" else 1)
        yield stream.mark(side)
    yield link.node.later.Ibarrier()

"""All-reduce in shared memory of a node's GPUs: each folds its slice of all ranks' arrays and writes it to all.

Between processes the host waits for its device's event, then for MPI's barrier: no kernel waits for another process,
which would not run on a shared GPU. Symmetric arrays (see `cuda_ipc`) are reduced in place by one kernel, others piece
by piece in a scratch.
"""

from __future__ import annotations

from mpiddp.algorithms import handshake
from mpiddp.algorithms.handshake import Entries
from mpiddp.algorithms.local_reduce import bounds
from mpiddp.device import kernels, stream, transfer
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp, combining
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import cuda_ipc, staged_ring
from . import scratch as staging
from .scratch import DeviceScratch


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    ready = stream.ready(x)
    entries: Entries = yield from handshake.exchange(link, "all_reduce", x, cuda_ipc.find(x), op)
    factors = entries.factors_of(op)
    segment = cuda_ipc.segment(entries.common_segment())
    yield ready
    if link.size > kernels.MOST_ROWS:
        yield from staged_ring.all_reduce(link, x, op)
    elif segment is not None:
        yield link.later.Ibarrier()
        yield _in_place(link, x, op, segment, entries, factors)
        yield link.later.Ibarrier()
    elif (yield from link.resource(DeviceScratch).prepare(x)):
        yield from link.resource(DeviceScratch).passing(x, lambda piece: _in_pieces(link, piece, op, factors))
    else:
        yield from staged_ring.all_reduce(link, x, op)


def _in_place(
    link: Link,
    x: Array,
    op: ReduceOp,
    segment: cuda_ipc.DeviceSegment,
    entries: Entries,
    factors: list[float] | None,
) -> stream.Mark:
    edges = bounds(x.size, link.size, x.itemsize)
    first, last = edges[link.rank], edges[link.rank + 1]
    rows = [row[first:last] for row in entries.views(segment, link.ranks, x.size, x.dtype)]
    side = stream.side("add", x)
    kernels.fold(combining(op), rows, rows, side, _divisor(op, link), factors)
    return stream.mark(side)


def _divisor(op: ReduceOp, link: Link) -> int:
    return link.size if op.name == "AVG" else 1


def _in_pieces(link: Link, x: Array, op: ReduceOp, factors: list[float] | None) -> Steps:
    """Work queued after one barrier ends before the next: three rounds are apart, as the scratch requires."""
    scratch = link.resource(DeviceScratch)
    down, add = stream.side("down", x), stream.side("add", x)
    step = max(staging.PIECE_BYTES // x.itemsize, 1)
    folded: tuple[int, int, list[Array]] | None = None

    def others(start: int, stop: int) -> list[tuple[int, int, int]]:
        edges = bounds(stop - start, link.size, x.itemsize)
        return [(rank, edges[rank], edges[rank + 1]) for rank in range(link.size) if rank != link.rank]

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        for _, first, last in others(start, stop):
            transfer.across(buffers[link.rank][first:last], x[start + first : start + last], down)

    def fold(start: int, stop: int, buffers: list[Array]) -> None:
        edges = bounds(stop - start, link.size, x.itemsize)
        first, last = edges[link.rank], edges[link.rank + 1]
        rows = [buffer[first:last] for buffer in buffers]
        here, own = rows[link.rank], x[start + first : start + last]
        rows[link.rank] = own
        kernels.fold(combining(op), rows, (own, here), add, _divisor(op, link), factors)

    def collect(start: int, stop: int, buffers: list[Array]) -> None:
        for rank, first, last in others(start, stop):
            transfer.across(x[start + first : start + last], buffers[rank][first:last], add)

    for start in range(0, x.size, step):
        stop = min(start + step, x.size)
        piece = (start, stop, scratch.begin_round(stop - start, x.dtype))
        put(*piece)
        yield stream.mark(down)
        yield stream.mark(add)
        yield link.later.Ibarrier()
        if folded is not None:
            collect(*folded)
        fold(*piece)
        folded = piece
    if folded is not None:
        scratch.begin_round(0, x.dtype)
        yield stream.mark(add)
        yield link.later.Ibarrier()
        collect(*folded)
        yield stream.mark(add)

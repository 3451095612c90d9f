"""Reduction by exchange: each rank gathers one slice from all, reduces it, and distributes it.

It takes two rounds and sends as few bytes as `ring`. It serves reductions that MPI does not define, and all reductions
under ``MPIDDP_DETERMINISTIC=1``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from mpiddp.mpi import message
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import as_bytes, movable
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from .local_reduce import accumulated_in, bounds, reduce_rows, widened


def slice_sizes(x: Array, parts: int) -> list[int]:
    edges = bounds(x.size, parts, x.itemsize)
    return [x.itemsize * (end - start) for start, end in itertools.pairwise(edges)]


def reduce_slices(link: Channel, x: Array, op: ReduceOp, sizes: Sequence[int], divisor: int) -> Steps:
    """Reduce slice r of ``x``, of ``sizes[r]`` bytes, on rank r.

    Return this rank's slice in the accumulation
    dtype. ``AVG`` divides by ``divisor``.
    """
    sent = x if op.factor is None else widened(op, x)
    sent_sizes = [size // x.itemsize * sent.itemsize for size in sizes]
    mine = np.empty(sizes[link.rank] // x.itemsize, accumulated_in(x.dtype))
    rows = np.empty((link.size, mine.size), sent.dtype)
    yield link.now.Ialltoallv(
        (as_bytes(sent), sent_sizes, None, MPI.BYTE), (as_bytes(rows), [rows[0].nbytes] * link.size, None, MPI.BYTE)
    )
    reduce_rows(op, list(rows), (mine,), divisor)
    return mine


def in_turn(steps: Callable[[Channel, Array], Steps], link: Channel, x: Array) -> Steps:
    """Run steps on pieces whose bytes, widened, fit MPI's counts."""
    flat, step = x.reshape(-1), max(message.MAX_COUNT // accumulated_in(x.dtype).itemsize, 1)
    for start in range(0, x.size, step):
        yield from steps(link, flat[start : start + step])
        link = link.after()


def _is_long(x: Array) -> bool:
    return x.size * accumulated_in(x.dtype).itemsize > message.MAX_COUNT


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    if _is_long(x) and x.size > 1:
        yield from in_turn(lambda link, piece: all_reduce(link, piece, op), link, x)
        return
    sizes = slice_sizes(x, link.size)
    mine = yield from reduce_slices(link, x, op, sizes, link.size)
    yield link.later.Iallgatherv(as_bytes(mine.astype(x.dtype, copy=False)), (as_bytes(x), sizes, None, MPI.BYTE))


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    if _is_long(x) and x.size > 1:
        yield from in_turn(lambda link, piece: reduce(link, piece, root, op), link, x)
        return
    sizes = slice_sizes(x, link.size)
    mine = yield from reduce_slices(link, x, op, sizes, link.size)
    received = (as_bytes(x), sizes, None, MPI.BYTE) if link.rank == root else None
    yield link.later.Igatherv(as_bytes(mine.astype(x.dtype, copy=False)), received, root)


def reduce_scatter(link: Channel, output: Array, x: Array, op: ReduceOp) -> Steps:
    if _is_long(x) and output.size > 1:
        blocks, results = x.reshape(link.size, -1), output.reshape(-1)
        step = max(message.MAX_COUNT // (link.size * accumulated_in(x.dtype).itemsize), 1)
        for start in range(0, output.size, step):
            piece = np.ascontiguousarray(blocks[:, start : start + step])
            yield from reduce_scatter(link, results[start : start + step], piece, op)
            link = link.after()
        return
    sent = x if op.factor is None else widened(op, x)
    rows = np.empty((link.size, output.size), sent.dtype)
    yield link.now.Ialltoall(movable(sent), movable(rows))
    reduce_rows(op, list(rows), (output.reshape(-1),), link.size)

"""Reduction by exchange: each rank gathers one slice of all ranks' arrays, reduces it, and distributes the result.

It takes two rounds, or one for reduce_scatter, and sends no more bytes than `ring`. It replaces MPI's own algorithm in
reductions that MPI does not define, and under ``MPIDDP_DETERMINISTIC=1`` in all (see `fallback`).
"""

import itertools

import numpy as np

from mpiddp.faults.calls import NO_ROOT
from mpiddp.mpi import message
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import as_bytes, movable
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from .local_reduce import accumulated_in, bounds, reduce_rows, widened


def _longest(x: Array, ranks: int = 1) -> int:
    """Return how many elements of ``x`` for each of ``ranks`` fit MPI's counts in the accumulation dtype."""
    return max(message.MAX_COUNT // (ranks * accumulated_in(x.dtype).itemsize), 1)


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce into ``x`` on the root, or on all ranks if there is no root."""
    flat, step = x.reshape(-1), _longest(x)
    for start in range(0, max(x.size, 1), step):
        piece = flat[start : start + step]
        edges = bounds(piece.size, link.size, piece.itemsize)
        counts = [stop - first for first, stop in itertools.pairwise(edges)]
        sent = piece if op.factor is None else widened(op, piece)
        rows = np.empty((link.size, counts[link.rank]), sent.dtype)
        yield link.now.Ialltoallv(
            (as_bytes(sent), [count * sent.itemsize for count in counts], None, MPI.BYTE),
            (as_bytes(rows), [rows[0].nbytes] * link.size, None, MPI.BYTE),
        )
        mine = np.empty(counts[link.rank], x.dtype)
        reduce_rows(op, list(rows), (mine,), link.size)
        received = (as_bytes(piece), [count * x.itemsize for count in counts], None, MPI.BYTE)
        if root == NO_ROOT:
            yield link.later.Iallgatherv(as_bytes(mine), received)
        else:
            yield link.later.Igatherv(as_bytes(mine), received if link.rank == root else None, root)
        del sent, rows, mine, received  # this frees their memory before the next piece needs as much
        link = link.after()


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    return reduce(link, x, NO_ROOT, op)


def reduce_scatter(link: Channel, output: Array, x: Array, op: ReduceOp) -> Steps:
    blocks, results, step = x.reshape(link.size, output.size), output.reshape(-1), _longest(x, link.size)
    for start in range(0, max(output.size, 1), step):
        piece = np.ascontiguousarray(blocks[:, start : start + step])
        sent = piece if op.factor is None else widened(op, piece)
        rows = np.empty(piece.shape, sent.dtype)
        yield link.now.Ialltoall(movable(sent), movable(rows))
        reduce_rows(op, list(rows), (results[start : start + step],), link.size)
        del piece, sent, rows
        link = link.after()

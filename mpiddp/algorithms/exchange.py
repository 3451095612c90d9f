"""Reduction by exchange: each rank gathers everybody's part of one slice, folds it in rank order, and hands it out.

Two rounds and 2 (p - 1) / p of the array's bytes from each rank, as few as any algorithm can send [1]_. Any operation
on any dtype, half types accumulated in float32, the same bits on every rank and in every run: it is there for what
MPI's own reductions cannot do, and for all of them under ``MPIDDP_DETERMINISTIC=1``.

References
----------
.. [1] P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
   Parallel and Distributed Computing 69, 2009.
"""

from __future__ import annotations

import numpy as np

from mpiddp.mpi.library import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes, movable
from mpiddp.mpi.reduction import ReduceOp, fold, premultiply
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array


def _counts(length: int, size: int, itemsize: int) -> list[int]:
    """Return the bytes of each of ``size`` nearly equal slices of ``length`` elements."""
    return [itemsize * (length * (rank + 1) // size - length * rank // size) for rank in range(size)]


def _slice_of_sums(link: Link, x: Array, op: ReduceOp, counts: list[int]) -> tuple[Steps, Array]:
    """Return the steps that fold this rank's slice over all ranks, and the array that will hold it."""
    mine = np.empty(counts[link.rank] // x.itemsize, x.dtype)
    rows = np.empty((link.size, mine.size), x.dtype)

    def steps() -> Steps:
        sent = x
        if op.factor is not None:
            sent = x.copy()
            premultiply(op, sent)
        yield link.now.Ialltoallv(
            (as_bytes(sent), counts, None, MPI.BYTE), (as_bytes(rows), [mine.nbytes] * link.size, None, MPI.BYTE)
        )
        fold(op, rows, mine, link.size)

    return steps(), mine


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    counts = _counts(x.size, link.size, x.itemsize)
    reduction, mine = _slice_of_sums(link, x, op, counts)
    yield from reduction
    yield link.later.Iallgatherv(as_bytes(mine), (as_bytes(x), counts, None, MPI.BYTE))


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    counts = _counts(x.size, link.size, x.itemsize)
    reduction, mine = _slice_of_sums(link, x, op, counts)
    yield from reduction
    received = (as_bytes(x), counts, None, MPI.BYTE) if link.rank == root else None
    yield link.later.Igatherv(as_bytes(mine), received, root)


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    rows = np.empty((link.size, output.size), x.dtype)
    if op.factor is not None:
        x = x.copy()
        premultiply(op, x)
    yield link.now.Ialltoall(movable(x), movable(rows))
    fold(op, rows, output.reshape(-1), link.size)

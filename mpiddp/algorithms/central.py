"""The naive way: one rank collects everybody's array, folds them, and sends the result to all.

The root receives and sends p - 1 times the array while the others wait: the yardstick for what the others save.
"""

from __future__ import annotations

import numpy as np

from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp, premultiply
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from .local_reduce import fold_rows


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    sent = x
    if op.factor is not None:
        sent = x.copy()
        premultiply(op, sent)
    rows = np.empty((link.size, x.size), x.dtype) if link.rank == root else None
    yield link.now.Igather(movable(sent), None if rows is None else movable(rows), root)
    if rows is not None:
        fold_rows(op, list(rows), (x.reshape(-1),), link.size)


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place, by way of rank 0."""
    yield from reduce(link, x, 0, op)
    yield link.later.Ibcast(movable(x), 0)

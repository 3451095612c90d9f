"""All-reduce as a reduction to rank 0 along a tree and a broadcast back: twice the rounds of recursive doubling."""

from __future__ import annotations

from mpiddp.mpi.link import Channel
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import tree


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    yield from tree.reduce(link, x, 0, op)
    yield from tree.broadcast(link, x, 0)

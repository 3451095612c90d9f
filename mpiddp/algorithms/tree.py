"""Reduction along a binomial tree, and all-reduce by recursive doubling: about log2 p rounds, for short arrays.

The first message of one rank may go to the last receive of another. So all messages are sent on ``later``, when the
operation is at the head of the queue.

References
----------
R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19,
2005.
"""

from __future__ import annotations

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import READY, All, Steps
from mpiddp.typing import Array

from .local_reduce import combine, finish, widened
from .tags import Tag


def _send(link: Channel, x: Array, rank: int) -> MPI.Request:
    return link.later.Isend(movable(x), rank, Tag.TREE)


def _receive(link: Channel, x: Array, rank: int) -> MPI.Request:
    return link.later.Irecv(movable(x), rank, Tag.TREE)


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    yield READY
    carried = widened(op, x)
    incoming = np.empty_like(carried)
    place = (link.rank - root) % link.size
    distance = 1
    while distance < link.size:
        if place & distance:
            yield _send(link, carried, (link.rank - distance) % link.size)
            return
        if place + distance < link.size:
            yield _receive(link, incoming, (link.rank + distance) % link.size)
            combine(op, carried, incoming, carried)
        distance *= 2
    finish(op, carried, link.size)
    x.reshape(-1)[...] = carried


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    yield READY
    carried = widened(op, x)
    incoming = np.empty_like(carried)
    doubling = 1 << (link.size.bit_length() - 1)  # the largest power of two that is not above the number of ranks
    extra = link.size - doubling
    paired = link.rank < 2 * extra  # this rank has a neighbour; the even one of the two takes part in the doubling
    if paired and link.rank % 2:
        yield _send(link, carried, link.rank - 1)
        yield _receive(link, x, link.rank - 1)
        return
    if paired:
        yield _receive(link, incoming, link.rank + 1)
        combine(op, carried, incoming, carried)
    place = link.rank // 2 if paired else link.rank - extra
    distance = 1
    while distance < doubling:
        other = place ^ distance
        partner = 2 * other if other < extra else other + extra
        yield All([_receive(link, incoming, partner), _send(link, carried, partner)])
        first, second = (incoming, carried) if place & distance else (carried, incoming)
        combine(op, first, second, carried)
        distance *= 2
    finish(op, carried, link.size)
    x.reshape(-1)[...] = carried
    if paired:
        yield _send(link, x, link.rank + 1)

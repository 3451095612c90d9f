"""Rabenseifner's all-reduce: halves are exchanged and reduced, recursively, then gathered the same way back.

2 log2 p rounds and as many bytes as a ring, where p is a power of two; other numbers of ranks join in pairs first. Half
types travel as float32 while they are summed.

References
----------
R. Rabenseifner, "Optimization of collective reduction operations", International Conference on Computational Science,
2004.
"""

from __future__ import annotations

import numpy as np

from mpiddp.mpi.link import READY, Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp, finish
from mpiddp.mpi.work import All, Steps
from mpiddp.typing import Array

from .local_reduce import bounds, widened
from .tags import Tag
from .tree import combine_pair, enter, leave, rank_at


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    yield READY
    carried = widened(op, x)
    spare = np.empty_like(carried)
    flat = x.reshape(-1)
    place, places = yield from enter(link, carried, spare, op)
    if place >= 0:
        edges = bounds(x.size, places, x.itemsize)
        first, last = 0, places  # the slices that this rank still reduces
        reach = places // 2
        while reach:
            partner = rank_at(link, place ^ reach)
            lower = not place & reach
            middle = first + reach
            kept, given = ((first, middle), (middle, last)) if lower else ((middle, last), (first, middle))
            incoming = spare[edges[kept[0]] : edges[kept[1]]]
            outgoing = carried[edges[given[0]] : edges[given[1]]]
            yield All(
                [
                    link.later.Irecv(movable(incoming), partner, Tag.TREE),
                    link.later.Isend(movable(outgoing), partner, Tag.TREE),
                ]
            )
            combine_pair(op, carried[edges[kept[0]] : edges[kept[1]]], incoming, lower=lower)
            first, last = kept
            reach //= 2
        mine = slice(edges[first], edges[last])
        finish(op, carried[mine], link.size)
        flat[mine] = carried[mine]
        reach = 1
        while reach < places:
            partner = rank_at(link, place ^ reach)
            begin = place // reach * reach  # the slices that this rank has by now, and those of its partner
            other = begin ^ reach
            outgoing = flat[edges[begin] : edges[begin + reach]]
            incoming = flat[edges[other] : edges[other + reach]]
            yield All(
                [
                    link.later.Irecv(movable(incoming), partner, Tag.TREE),
                    link.later.Isend(movable(outgoing), partner, Tag.TREE),
                ]
            )
            reach *= 2
    yield from leave(link, flat)

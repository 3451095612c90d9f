"""Collectives around a ring: every rank sends to the next one only, 2 (p - 1) / p of the array's bytes in all.

No rank and no link carries more than any other [1]_, so the time for long arrays does not grow with the number of
ranks. Slice r is summed from rank r + 1 around to rank r: each is summed once, so the bits are the same on every rank
and in every run. Half types travel as float32 while they are summed.

References
----------
.. [1] P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
   Parallel and Distributed Computing 69, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp, combine, finish
from mpiddp.mpi.requests import All, Steps
from mpiddp.typing import Array

from .local_reduce import bounds, widened
from .tags import Tag


def _neighbours(link: Channel) -> tuple[int, int]:
    return (link.rank - 1) % link.size, (link.rank + 1) % link.size


def _reduce_around(link: Channel, parts: Sequence[Array], op: ReduceOp) -> Steps:
    """Reduce part r over all ranks, for all r, and return this rank's, in the type that sums are accumulated in."""
    before, after = _neighbours(link)
    comm = link.now
    carried = widened(op, parts[before])
    for step in range(2, link.size + 1):
        own = widened(op, parts[(link.rank - step) % link.size])
        incoming = np.empty_like(own)
        yield All([comm.Irecv(movable(incoming), before, Tag.RING), comm.Isend(movable(carried), after, Tag.RING)])
        combine(op, incoming, own, incoming)
        carried, comm = incoming, link.later
    finish(op, carried, link.size)
    return carried


def _gather_around(link: Channel, parts: Sequence[Array]) -> Steps:
    """Copy rank r's part r to all ranks, for all r."""
    before, after = _neighbours(link)
    comm = link.now
    for step in range(link.size - 1):
        outgoing, incoming = parts[(link.rank - step) % link.size], parts[(link.rank - step - 1) % link.size]
        yield All([comm.Irecv(movable(incoming), before, Tag.RING), comm.Isend(movable(outgoing), after, Tag.RING)])
        comm = link.later


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    edges = bounds(x.size, link.size, x.itemsize)
    flat = x.reshape(-1)
    parts = [flat[edges[rank] : edges[rank + 1]] for rank in range(link.size)]
    parts[link.rank][...] = yield from _reduce_around(link, parts, op)
    yield from _gather_around(link.after(), parts)


def reduce_scatter(link: Channel, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    reduced = yield from _reduce_around(link, list(x.reshape(link.size, -1)), op)
    output.reshape(-1)[...] = reduced


def all_gather(link: Channel, output: Array, x: Array) -> Steps:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    blocks = list(output.reshape(link.size, -1))
    blocks[link.rank][...] = x.reshape(-1)
    yield from _gather_around(link, blocks)

"""Collectives along binomial trees, and by recursive doubling: about log2 p messages one after the other.

For short arrays, where the number of rounds is what costs. A rank's first step is another one's last, so everything is
sent at the head of the queue. The tree is fixed and both partners combine the lower rank's numbers with the higher
one's, so all have the same bits, in every run. Half types travel as float32 while they are summed.

References
----------
R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19, 2005.
"""

from __future__ import annotations

import numpy as np

from mpiddp.mpi.link import READY, Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp, combine, finish
from mpiddp.mpi.work import All, Steps
from mpiddp.typing import Array

from .local_reduce import widened
from .tags import Tag


def broadcast(link: Channel, x: Array, root: int) -> Steps:
    """Copy root's ``x`` to all ranks."""
    yield READY
    place = (link.rank - root) % link.size
    reach = 1
    while reach < link.size and not place & reach:
        reach *= 2
    if place:
        yield link.later.Irecv(movable(x), (place - reach + root) % link.size, Tag.TREE)
    sent = []
    while reach > 1:
        reach //= 2
        if place + reach < link.size:
            sent.append(link.later.Isend(movable(x), (place + reach + root) % link.size, Tag.TREE))
    yield All(sent)


def _reduced(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` to the root, and return the result there."""
    carried = widened(op, x)
    incoming = np.empty_like(carried)
    place = (link.rank - root) % link.size
    reach = 1
    while reach < link.size:
        if place & reach:
            yield link.later.Isend(movable(carried), (place - reach + root) % link.size, Tag.TREE)
            return None
        if place + reach < link.size:
            yield link.later.Irecv(movable(incoming), (place + reach + root) % link.size, Tag.TREE)
            combine(op, carried, incoming, carried)
        reach *= 2
    finish(op, carried, link.size)
    return carried


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    yield READY
    result = yield from _reduced(link, x, root, op)
    if result is not None:
        x.reshape(-1)[...] = result


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place, by recursive doubling."""
    yield READY
    carried = widened(op, x)
    incoming = np.empty_like(carried)
    place, places = yield from enter(link, carried, incoming, op)
    reach = 1
    while place >= 0 and reach < places:
        partner = rank_at(link, place ^ reach)
        yield All(
            [
                link.later.Irecv(movable(incoming), partner, Tag.TREE),
                link.later.Isend(movable(carried), partner, Tag.TREE),
            ]
        )
        combine_pair(op, carried, incoming, lower=not place & reach)
        reach *= 2
    finish(op, carried, link.size)
    flat = x.reshape(-1)
    flat[...] = carried
    yield from leave(link, flat)


def _extra(link: Channel) -> int:
    """Return how many ranks there are beyond the largest power of two."""
    return link.size - (1 << (link.size.bit_length() - 1))


def rank_at(link: Channel, place: int) -> int:
    """Return the rank that has a place among the power of two that go on."""
    return 2 * place if place < _extra(link) else place + _extra(link)


def enter(link: Channel, carried: Array, incoming: Array, op: ReduceOp) -> Steps:
    """Let the first ranks join in pairs, so that a power of two goes on.

    Returns
    -------
    tuple of int
        As the value of the steps: this rank's place among those that go on, -1 for one that does not, and their number.
    """
    extra = _extra(link)
    places = link.size - extra
    if link.rank >= 2 * extra:
        return link.rank - extra, places
    if link.rank % 2:
        yield link.later.Isend(movable(carried), link.rank - 1, Tag.TREE)
        return -1, places
    yield link.later.Irecv(movable(incoming), link.rank + 1, Tag.TREE)
    combine(op, carried, incoming, carried)
    return link.rank // 2, places


def leave(link: Channel, x: Array) -> Steps:
    """Give the result to the ranks that did not go on."""
    if link.rank < 2 * _extra(link):
        if link.rank % 2:
            yield link.later.Irecv(movable(x), link.rank - 1, Tag.TREE)
        else:
            yield link.later.Isend(movable(x), link.rank + 1, Tag.TREE)


def combine_pair(op: ReduceOp, own: Array, other: Array, *, lower: bool) -> None:
    """Combine a partner's numbers into this rank's, the lower rank's first on both sides."""
    combine(op, own if lower else other, other if lower else own, own)

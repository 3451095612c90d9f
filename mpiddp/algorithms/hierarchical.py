"""All-reduce over several nodes: reduce in the node, across nodes slice by slice in parallel, gather in the node.

Each node sends 2 (n - 1) / n of the array's bytes over its links, n being the number of nodes, however many ranks it
has: a ring over all ranks sends up to p times as much, depending on where they are. All ranks of a node take part in
the crossing, each with its slice; where nodes have different numbers of ranks, as many as the smallest one has.

Symmetric arrays are reduced where they lie. Ordinary ones go by messages in the node. Rows are folded in rank order in
the node and in node order across, so the bits are the same on every rank and in every run. ``AVG`` divides in the node,
where half types are float32 still: a sum over all ranks need not fit into float16.

References
----------
The scheme of Horovod's and NCCL's hierarchical all-reduce; A. Awan et al., "Optimized broadcast for deep learning
workloads on dense-GPU clusters", and Open MPI's coll/han.
"""

from __future__ import annotations

from mpiddp.mpi import message, symmetric
from mpiddp.mpi.board import comparing
from mpiddp.mpi.library import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import exchange
from .agreement import Entry, meet, views
from .folding import bounds, fold_rows


@comparing
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    entries = yield from meet(link, "all_reduce", x, op)
    segments = [{entry.segment for entry in _on_node(link, entries, node)} for node in set(link.nodes)]
    if all(len(numbers) == 1 and 0 not in numbers for numbers in segments):
        yield from _in_place(link, x, op, entries)
    else:
        yield from _by_messages(link, x, op)


def _on_node(link: Link, entries: list[Entry], node: int) -> list[Entry]:
    """Return what the ranks of a node have told."""
    return [entry for entry, where in zip(entries, link.nodes, strict=True) if where == node]


def _ranks_of_nodes(link: Link) -> set[int]:
    """Return how many ranks the nodes have."""
    return {link.nodes.count(node) for node in link.nodes}


def _across(link: Link, mine: Array, op: ReduceOp) -> Steps:
    """Reduce what the nodes have summed of a slice, on the ranks that have it."""
    if link.across is not None:
        part = ReduceOp.SUM if op.name in ("AVG", "PREMUL_SUM") else op
        yield from exchange.all_reduce(link.across.after(), mine, part)


def _by_messages(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ordinary arrays."""
    if x.nbytes > message.MAX_COUNT and x.size > 1:
        yield from exchange.in_turn(lambda _, piece: _by_messages(link, piece, op), link, x)
        return
    places = min(_ranks_of_nodes(link))
    sizes = exchange.slice_sizes(x, places) + [0] * (link.node.size - places)
    mine = yield from exchange.reduce_slices(link.node.after(), x, op, sizes, link.size)
    yield from _across(link, mine, op)
    yield link.node.later.Iallgatherv(as_bytes(mine), (as_bytes(x), sizes, None, MPI.BYTE))


def _in_place(link: Link, x: Array, op: ReduceOp, entries: list[Entry]) -> Steps:
    """Reduce symmetric arrays."""
    node, told = link.node, _on_node(link, entries, link.nodes[link.rank])
    arrays = views(symmetric.segment(told[0].segment), told, node.ranks, x.dtype)
    factors = None if op.factor is None else [entry.factor for entry in told]
    edges = bounds(x.size, node.size, x.itemsize)
    rows = [array[edges[node.rank] : edges[node.rank + 1]] for array in arrays]
    if len(_ranks_of_nodes(link)) == 1:
        fold_rows(op, rows, (rows[node.rank],), link.size, factors)
    else:  # the slices that go across are larger than those that were folded
        fold_rows(op, rows, rows, link.size, factors)
        yield node.later.Ibarrier()
        edges = bounds(x.size, min(_ranks_of_nodes(link)), x.itemsize)
        edges += [x.size] * (node.size + 1 - len(edges))
        rows = [array[edges[node.rank] : edges[node.rank + 1]] for array in arrays]
    mine = rows[node.rank]
    yield from _across(link, mine, op)
    for row in rows:
        if row is not mine:
            row[...] = mine
    yield node.later.Ibarrier()

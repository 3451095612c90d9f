"""The MPI library's own collectives: the best choice for short messages, and the yardstick for all others.

References
----------
MPI 4.1, chapter 6, "Collective Communication".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddp.mpi.library import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes, chunks, movable
from mpiddp.mpi.reduction import ReduceOp, finish, mpi_op, premultiply
from mpiddp.mpi.work import All, Steps
from mpiddp.typing import Array


def barrier(link: Link) -> Steps:
    """Wait until every rank has come."""
    yield link.now.Ibarrier()


def broadcast(link: Link, x: Array, root: int) -> Steps:
    """Copy root's ``x`` to all ranks."""
    yield link.now.Ibcast(movable(x), root)


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    premultiply(op, x)
    reduction = mpi_op(x.dtype, op)
    assert reduction is not None
    pieces = chunks(x)
    if len(pieces) == 1:
        yield link.now.Iallreduce(MPI.IN_PLACE, x, reduction)
    else:
        yield All([link.now.Iallreduce(MPI.IN_PLACE, piece, reduction) for piece in pieces])
    finish(op, x, link.size)


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; MPI leaves the other ranks' ``x`` as it is."""
    reduction = mpi_op(x.dtype, op)
    assert reduction is not None
    if link.rank == root:
        premultiply(op, x)
        yield All([link.now.Ireduce(MPI.IN_PLACE, piece, reduction, root) for piece in chunks(x)])
        finish(op, x, link.size)
    else:
        sent = x
        if op.factor is not None:
            sent = x.copy()
            premultiply(op, sent)
        yield All([link.now.Ireduce(piece, None, reduction, root) for piece in chunks(sent)])


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    reduction = mpi_op(x.dtype, op)
    assert reduction is not None
    if op.factor is not None:
        x = x.copy()
        premultiply(op, x)
    yield link.now.Ireduce_scatter_block(x, output, reduction)
    finish(op, output, link.size)


def all_gather(link: Link, output: Array, x: Array) -> Steps:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    yield link.now.Iallgather(movable(x), movable(output))


def _displaced(outputs: Sequence[Array]) -> tuple[list[int], list[int], Array]:
    """Return the lengths and offsets in bytes of arrays that lie one after the other, and memory for them."""
    sizes = [output.nbytes for output in outputs]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return sizes, offsets, np.empty(sum(sizes), np.uint8)


def _unpack(memory: Array, offsets: Sequence[int], outputs: Sequence[Array]) -> None:
    for offset, output in zip(offsets, outputs, strict=True):
        as_bytes(output)[...] = memory[offset : offset + output.nbytes]


def _pack(inputs: Sequence[Array], offsets: Sequence[int], memory: Array) -> None:
    for offset, x in zip(offsets, inputs, strict=True):
        memory[offset : offset + x.nbytes] = as_bytes(x)


def all_gather_list(link: Link, outputs: Sequence[Array], x: Array) -> Steps:
    """Copy every rank's ``x``, whose sizes may differ, to all ranks, each into an array of its own."""
    sizes, offsets, memory = _displaced(outputs)
    yield link.now.Iallgatherv(as_bytes(x), (memory, sizes, offsets, MPI.BYTE))
    _unpack(memory, offsets, outputs)


def gather(link: Link, outputs: Sequence[Array] | None, x: Array, root: int) -> Steps:
    """Copy every rank's ``x`` to root, each into an array of its own."""
    if outputs is None:
        yield link.now.Igatherv(as_bytes(x), None, root)
    else:
        sizes, offsets, memory = _displaced(outputs)
        yield link.now.Igatherv(as_bytes(x), (memory, sizes, offsets, MPI.BYTE), root)
        _unpack(memory, offsets, outputs)


def scatter(link: Link, x: Array, inputs: Sequence[Array] | None, root: int) -> Steps:
    """Copy array r of root's ``inputs`` to rank r's ``x``."""
    if inputs is None:
        yield link.now.Iscatterv(None, as_bytes(x), root)
    else:
        sizes, offsets, memory = _displaced(inputs)
        _pack(inputs, offsets, memory)
        yield link.now.Iscatterv((memory, sizes, offsets, MPI.BYTE), as_bytes(x), root)


def all_to_all(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> Steps:
    """Copy array s of rank r's ``inputs`` to array r of rank s's ``outputs``, for all r and s."""
    sizes_in, offsets_in, memory_in = _displaced(inputs)
    sizes_out, offsets_out, memory_out = _displaced(outputs)
    _pack(inputs, offsets_in, memory_in)
    yield link.now.Ialltoallv(
        (memory_in, sizes_in, offsets_in, MPI.BYTE), (memory_out, sizes_out, offsets_out, MPI.BYTE)
    )
    _unpack(memory_out, offsets_out, outputs)


def all_to_all_single(
    link: Link, output: Array, x: Array, output_counts: Sequence[int], input_counts: Sequence[int]
) -> Steps:
    """Copy consecutive blocks of ``x``, of the given lengths in bytes, to the ranks, and theirs to ``output``."""
    yield link.now.Ialltoallv(
        (as_bytes(x), list(input_counts), None, MPI.BYTE), (as_bytes(output), list(output_counts), None, MPI.BYTE)
    )

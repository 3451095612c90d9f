"""Collectives by device pointers, where MPI is known to take them.

MPI knows no streams: a collective begins with an event of the kernels queued before, and ends with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.algorithms import native
from mpiddp.algorithms.handshake import without
from mpiddp.algorithms.local_reduce import finish, premultiply, reduce_rows
from mpiddp.device import array_namespace, stream, transfer
from mpiddp.device.place import place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import All, Steps
from mpiddp.typing import Array

from .staged import through_host


def broadcast(link: Link, x: Array, root: int) -> Steps:
    yield stream.ready(x)
    yield from native.broadcast(link.after(), x, root)


def _moved(
    algorithm: Callable[..., Steps], link: Link, reads: Sequence[Array], writes: Sequence[Array], *args: Any
) -> Steps:
    """Run an algorithm of messages, which copies this rank's own block itself.

    Arrays on several devices go through the host: kernels do not reach another device's memory.
    """
    arrays = [*reads, *writes]
    if len({place_of(x) for x in arrays}) > 1:
        yield from through_host(without(algorithm), link, None, (reads, writes), *args)
        return
    yield stream.ready(arrays[0])
    side = stream.side("add", arrays[0])
    yield from stream.under(side, algorithm(link.after(), *args))
    yield stream.mark(side)  # until then this generator keeps the arrays alive


def all_gather(link: Link, output: Array, x: Array) -> Steps:
    return all_gather_list(link, list(output.reshape(link.size, *x.shape)), x)


def all_gather_list(link: Link, outputs: Sequence[Array], x: Array) -> Steps:
    return _moved(native.all_to_all, link, [x], outputs, outputs, [x] * link.size)


def gather(link: Link, outputs: Sequence[Array] | None, x: Array, root: int) -> Steps:
    return _moved(native.gather, link, [x], outputs or (), outputs, x, root)


def scatter(link: Link, x: Array, inputs: Sequence[Array] | None, root: int) -> Steps:
    return _moved(native.scatter, link, inputs or (), [x], x, inputs, root)


def all_to_all(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> Steps:
    return _moved(native.all_to_all, link, inputs, outputs, outputs, inputs)


def all_to_all_single(
    link: Link, output: Array, x: Array, output_counts: Sequence[int], input_counts: Sequence[int]
) -> Steps:
    return _moved(native.all_to_all_single, link, [x], [output], output, x, output_counts, input_counts)


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce by MPI; Open MPI's non-blocking reductions read on the host and crash (ompi#9845, #12045)."""
    return _reduced(native.all_reduce, link, x, True, op)


def _reduced(algorithm: Callable[..., Steps], link: Link, x: Array, writes: bool, op: ReduceOp, *args: Any) -> Steps:
    """Multiply by the factor, and run a reduction of MPI's behind that; ``writes``: its result replaces ``x``."""
    side = stream.after("add", x)
    with stream.on(side):
        sent = x if writes or op.factor is None else x.copy()
        premultiply(op, sent)
    yield stream.mark(side)
    left = op if op.factor is None else ReduceOp.SUM
    yield from stream.under(side, algorithm(link.after(), sent, *args, left))
    yield stream.mark(side)


def alone(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce over this rank alone: nothing is left to do but the product with a factor."""
    side = stream.after("add", x)
    if op.factor is not None:
        flat = x.reshape(-1)
        with stream.on(side):
            reduce_rows(op, [flat], [flat], 1, [op.factor])
    yield stream.mark(side)


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    return _reduced(native.reduce, link, x, link.rank == root, op, root)


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    side = stream.after("add", x)
    stream.follow(side, stream.ready(output))  # perhaps on another device
    with stream.on(side):
        # MPI forbids an output that is this rank's block, and a factor must not change x.
        sent, result = x.copy(), array_namespace(x).empty_like(output)
        premultiply(op, sent)
    yield stream.mark(side)
    yield All(native.reduce_blocks(link.later, result, sent, op))
    with stream.on(side):
        finish(op, result, link.size)
    transfer.across(output, result, side)
    yield stream.mark(side)

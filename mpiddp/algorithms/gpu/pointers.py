"""Collectives by device pointers, where MPI is known to take them.

MPI knows no streams. So a collective first waits for the kernels that were queued before it, and waits for its own
kernels at its end.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.algorithms import native
from mpiddp.algorithms.handshake import without
from mpiddp.algorithms.local_reduce import finish, premultiplied, reduce_rows
from mpiddp.device import array_namespace, stream, transfer
from mpiddp.device.place import place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import All, Steps
from mpiddp.typing import Array

from .staged import ACCESS, through_host


def broadcast(link: Link, x: Array, root: int) -> Steps:
    yield stream.ready(x)
    yield from native.broadcast(link.after(), x, root)


def _all_gather(link: Link, output: Array, x: Array) -> Steps:
    return _all_gather_list(link, list(output.reshape(link.size, *x.shape)), x)


def _all_gather_list(link: Link, outputs: Sequence[Array], x: Array) -> Steps:
    return native.all_to_all(link, outputs, [x] * link.size)


MESSAGES: dict[str, Callable[..., Steps]] = {
    "all_gather": _all_gather,
    "all_gather_list": _all_gather_list,
    **{name: getattr(native, name) for name in ("gather", "scatter", "all_to_all", "all_to_all_single")},
}
"""The algorithms that consist of messages. A rank copies the block that it keeps without a message."""


def by_messages(operation: str, link: Link, *args: Any) -> Steps:
    """Run one of `MESSAGES`.

    Arrays on several devices go through the host, because kernels do not reach another device's memory.
    """
    algorithm, access = MESSAGES[operation], ACCESS[operation](link, *args)
    arrays = [*access[0], *access[1]]
    if len({place_of(x) for x in arrays}) > 1:
        yield from through_host(without(algorithm), link, None, access, *args)
        return
    yield stream.ready(arrays[0])
    side = stream.side("add", arrays[0])
    yield from stream.under(side, algorithm(link.after(), *args))
    yield stream.mark(side)  # this generator keeps the arrays alive until the kernels have ended


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce by MPI. `table` does not choose this for Open MPI, whose non-blocking reductions crash on device pointers.

    References
    ----------
    ompi#9845, ompi#12045.
    """
    return _reduced(native.all_reduce, link, x, True, op)


def _reduced(algorithm: Callable[..., Steps], link: Link, x: Array, writes: bool, op: ReduceOp, *args: Any) -> Steps:
    """Multiply by the factor, then run ``algorithm``, a reduction by MPI.

    ``writes`` says that the algorithm writes to ``x`` on this rank. Otherwise a copy is multiplied.
    """
    side = stream.after("add", x)
    with stream.on(side):
        sent = premultiplied(op, x, in_place=writes)
    yield stream.mark(side)
    left = op if op.factor is None else ReduceOp.SUM
    yield from stream.under(side, algorithm(link.after(), sent, *args, left))
    yield stream.mark(side)


def alone(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce in a group of one rank, where nothing is to be done but the product with a factor."""
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
    stream.follow(side, stream.ready(output))  # the output may be on another device
    with stream.on(side):
        # MPI forbids an output that is this rank's block, and a factor must not change x.
        sent, result = premultiplied(op, x.copy(), in_place=True), array_namespace(x).empty_like(output)
    yield stream.mark(side)
    yield All(native.reduce_blocks(link.later, result, sent, op))
    with stream.on(side):
        finish(op, result, link.size)
    transfer.across(output, result, side)
    yield stream.mark(side)

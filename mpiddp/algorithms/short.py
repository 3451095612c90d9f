"""Short arrays between nodes: they travel with the handshake, and each rank reduces or copies them by itself.

So the comparison of calls takes no extra time: there is one exchange, as in MPI's own algorithm.
"""

import numpy as np

from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp, is_half
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import handshake
from .handshake import Slots
from .local_reduce import combine_in_order, finish, reduce_rows

_BYTE = np.dtype(np.uint8)


def fits(link: Link, size_bytes: int = 0) -> bool:
    return not link.one_node and link.size <= handshake.MAX_ROWS and size_bytes <= handshake.SLOT_BYTES


def _reduce(link: Link, call: Call, x: Array, op: ReduceOp, out: Array | None, first: int = 0) -> Steps:
    slots = link.resource(Slots)
    slot = slots.take(link.now)
    factors = None
    if op.factor is None:
        yield slot.begin(handshake.pack(link, call), x)
    else:
        yield slot.begin(handshake.pack(link, call, factor=op.factor), x)
        factors = [op.factor] * link.size
    if not slot.agrees():
        factors = (yield from handshake.differing(link, slot.told)).factors_of(op)
    if out is not None:
        rows, flat = slot.rows(x.dtype, out.size, first), out.reshape(-1)
        if factors is not None or is_half(x.dtype):
            reduce_rows(op, rows, (flat,), link.size, factors)
        else:
            combine_in_order(getattr(np, op._combining), rows, flat)
            finish(op, flat, link.size)
    slots.give(slot, link.now)


def all_reduce(link: Link, call: Call, x: Array, op: ReduceOp) -> Steps:
    return _reduce(link, call, x, op, x)


def reduce(link: Link, call: Call, x: Array, root: int, op: ReduceOp) -> Steps:
    return _reduce(link, call, x, op, x if link.rank == root else None)


def reduce_scatter(link: Link, call: Call, output: Array, x: Array, op: ReduceOp) -> Steps:
    return _reduce(link, call, x, op, output, link.rank * output.size)


def _tell(link: Link, call: Call, x: Array | None, outputs: list[tuple[int, Array]]) -> Steps:
    """Exchange arrays. ``outputs`` has pairs of a rank and of flat bytes, to which that rank's array is copied."""
    slots = link.resource(Slots)
    slot = slots.take(link.now)
    yield slot.begin(handshake.pack(link, call), x)
    if not slot.agrees():
        yield from handshake.differing(link, slot.told)
    rows = slot.rows(_BYTE, handshake.SLOT_BYTES)
    for rank, output in outputs:
        output[...] = rows[rank][: output.size]
    slots.give(slot, link.now)


def broadcast(link: Link, call: Call, x: Array, root: int) -> Steps:
    if link.rank == root:
        return _tell(link, call, x, [])
    return _tell(link, call, None, [(root, as_bytes(x))])


def all_gather(link: Link, call: Call, output: Array, x: Array) -> Steps:
    return _tell(link, call, x, list(enumerate(as_bytes(output).reshape(link.size, -1))))


def all_gather_list(link: Link, call: Call, outputs: list[Array], x: Array) -> Steps:
    return _tell(link, call, x, list(enumerate(map(as_bytes, outputs))))

"""Short arrays between nodes: they travel with the handshake, and every rank reduces all of them by itself.

So the comparison of calls costs a short call nothing: one exchange, as MPI's own would be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.faults.calls import Call
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp, combine, finish, is_half
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from . import handshake
from .handshake import ROW_BYTES, SLOT_START
from .local_reduce import reduce_rows

_BYTE = np.dtype(np.uint8)


def fits(link: Link, size_bytes: int = 0) -> bool:
    return not link.one_node and link.size <= handshake.FEW_RANKS and size_bytes <= handshake.SLOT_BYTES


def _rows(told: bytearray, dtype: np.dtype[Any], count: int, first: int = 0) -> list[Array]:
    starts = range(SLOT_START + first * dtype.itemsize, len(told), ROW_BYTES)
    return [np.frombuffer(told, dtype, count, start) for start in starts]


def _reduce(call: Call, link: Link, x: Array, op: ReduceOp, out: Array | None, first: int = 0) -> Steps:
    entries, told = yield from handshake.tell(link, call, op, x)
    if out is None:
        return
    rows = _rows(told, x.dtype, out.size, first)
    flat = out.reshape(-1)
    if op.factor is not None or is_half(x.dtype):
        reduce_rows(op, rows, (flat,), link.size, entries.factors_of(op))
        return
    combine(op, rows[0], rows[1], flat)
    for row in rows[2:]:
        combine(op, flat, row, flat)
    finish(op, flat, link.size)


def all_reduce(call: Call, link: Link, x: Array, op: ReduceOp) -> Steps:
    return _reduce(call, link, x, op, x)


def reduce(call: Call, link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    return _reduce(call, link, x, op, x if link.rank == root else None)


def reduce_scatter(call: Call, link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    return _reduce(call, link, x, op, output, link.rank * output.size)


def broadcast(call: Call, link: Link, x: Array, root: int) -> Steps:
    _, told = yield from handshake.tell(link, call, None, x if link.rank == root else None)
    if link.rank != root:
        as_bytes(x)[...] = _rows(told, _BYTE, x.nbytes)[root]


def all_gather(call: Call, link: Link, output: Array, x: Array) -> Steps:
    _, told = yield from handshake.tell(link, call, None, x)
    as_bytes(output).reshape(link.size, -1)[...] = _rows(told, _BYTE, x.nbytes)


def all_gather_list(call: Call, link: Link, outputs: list[Array], x: Array) -> Steps:
    _, told = yield from handshake.tell(link, call, None, x)
    for output, start in zip(outputs, range(SLOT_START, len(told), ROW_BYTES), strict=True):
        as_bytes(output)[...] = np.frombuffer(told, np.uint8, output.nbytes, start)

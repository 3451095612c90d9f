"""Ring collectives: each rank sends to the next one only.

In an all-reduce a rank sends 2 (p - 1) / p of the array's bytes, or 3 (p - 1) / p for half types, whose sums are sent
in float32. No rank and no link carries more than any other [1]_. The sum of slice r begins at rank r + 1 and ends at
rank r. A `Transport` sends the parts and says where sums are formed.

References
----------
.. [1] P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.device.half import assign
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import movable
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import All, Steps
from mpiddp.typing import Array

from .local_reduce import accumulated_in, bounds, combine, finish, widened
from .tags import Tag


class Transport:
    """The transport of host arrays. It sends its first message on ``now``, and all others on ``later``."""

    def __init__(self, link: Channel, tag: int = Tag.RING) -> None:
        self.rank, self.size = link.rank, link.size
        self._comm, self._later, self._tag = link.now, link.later, tag
        self._loaded: Array = np.empty(0)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which sums are formed, such as a device's stream."""
        return contextlib.nullcontext()

    def load(self, x: Array) -> None:
        """Let the next `shift` send ``x``, which must not change until this `shift` has sent it."""
        self._loaded = x

    def shift(self, target: Array) -> Steps:
        """Send the loaded part to the next rank; receive and load ``target`` from the one before."""
        yield exchange(self._comm, self.rank, self.size, self._tag, movable(self._loaded), movable(target))
        self._comm, self._loaded = self._later, target


def exchange(comm: MPI.Intracomm, rank: int, size: int, tag: int, outgoing: object, incoming: object) -> All:
    before, after = (rank - 1) % size, (rank + 1) % size
    return All([comm.Irecv(incoming, before, tag), comm.Isend(outgoing, after, tag)])


def reduce_around(transport: Transport, parts: Sequence[Array], op: ReduceOp) -> Steps:
    """Reduce all ranks' part r on rank r; return this rank's part in the accumulation dtype."""
    rank, size = transport.rank, transport.size
    with transport.computing():
        carried = widened(op, parts[(rank - 1) % size])
    for step in range(2, size + 1):
        transport.load(carried)
        with transport.computing():
            own = _summand(op, parts[(rank - step) % size])
            incoming: Array = array_namespace(own).empty(own.size, own.dtype)
        yield from transport.shift(incoming)
        with transport.computing():
            combine(op, incoming, own, incoming)
        carried = incoming
    with transport.computing():
        finish(op, carried, size)
    return carried


def _summand(op: ReduceOp, x: Array) -> Array:
    """Return ``x``, or a copy where it has to be widened or multiplied."""
    return x if op.factor is None and accumulated_in(x.dtype) == x.dtype else widened(op, x)


def gather_around(transport: Transport, parts: Sequence[Array]) -> Steps:
    """Copy rank r's part r to all ranks."""
    transport.load(parts[transport.rank])
    for step in range(1, transport.size):
        yield from transport.shift(parts[(transport.rank - step) % transport.size])


def all_reduce_around(transport: Transport, flat: Array, op: ReduceOp) -> Steps:
    edges = bounds(flat.size, transport.size, flat.itemsize)
    parts = [flat[edges[rank] : edges[rank + 1]] for rank in range(transport.size)]
    reduced = yield from reduce_around(transport, parts, op)
    with transport.computing():
        assign(parts[transport.rank], reduced)
    yield from gather_around(transport, parts)


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    return all_reduce_around(Transport(link), x.reshape(-1), op)


def reduce_scatter(link: Channel, output: Array, x: Array, op: ReduceOp) -> Steps:
    reduced = yield from reduce_around(Transport(link), list(x.reshape(link.size, -1)), op)
    assign(output.reshape(-1), reduced)


def all_gather(link: Channel, output: Array, x: Array) -> Steps:
    blocks = list(output.reshape(link.size, -1))
    blocks[link.rank][...] = x.reshape(-1)
    yield from gather_around(Transport(link), blocks)

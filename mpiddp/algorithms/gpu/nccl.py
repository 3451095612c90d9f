"""Collectives by NCCL, for groups of ``backend="nccl"`` whose ranks have a GPU each.

A communicator is made with its group: one rank's id goes to all over MPI. An operation is one kernel on the group's
own stream behind the program's, and is complete when an event says so. What NCCL does not do, or not as it is meant
here, runs as without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp import device, settings
from mpiddp.device import array_namespace, ipc, nccl, stream
from mpiddp.device.place import place_of
from mpiddp.errors import ArrayError
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp, finish, premultiply
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

_communicators: dict[int, nccl.Communicator] = {}
"""By the number of their link."""


def connect(link: Link, wanted: bool) -> str | None:
    """Make the communicator of a new group, if all its ranks want and can have one; return why not.

    Collective over the group, of which nothing is on its way yet.
    """
    fault = nccl.fault() if wanted else "another backend was asked for"
    mine = None if fault else device.choice.device_uuid()
    told = link.now.allgather((fault, mine))
    for rank, (text, _) in enumerate(told):
        if text is not None:
            return text if rank == link.rank else f"rank {link.ranks[rank]} cannot: {text}"
    used = [uuid for _, uuid in told]
    for rank, uuid in enumerate(used):
        first = used.index(uuid)
        if first != rank:
            return f"ranks {link.ranks[first]} and {link.ranks[rank]} share a GPU, and NCCL wants one for each"
    number = link.now.bcast(nccl.unique_id() if link.rank == 0 else None)
    _communicators[link.id] = nccl.Communicator(link.size, number, link.rank)
    return None


def connected(link: Link) -> bool:
    """Tell whether a group has a communicator."""
    return link.id in _communicators


def disconnect(link: Link) -> None:
    """Destroy a group's communicator, if it has one; all its ranks call, when nothing is on its way."""
    found = _communicators.pop(link.id, None)
    if found is not None:
        ipc.settle(found.device)
        found.destroy()
        stream.drop(_role(link))


def does(operation: str, link: Link, dtype: np.dtype[Any], op: ReduceOp | None) -> bool:
    """Tell whether ``operation`` on arrays of a device goes by NCCL in a group."""
    if not connected(link):
        return False
    if operation in ("broadcast", "all_gather"):
        return True
    reducing = operation in ("all_reduce", "reduce", "reduce_scatter") and op is not None
    return reducing and not settings.deterministic() and nccl.reduces(dtype, op.name)  # type: ignore[union-attr]


def _role(link: Link) -> str:
    """Return what the stream of a group is known by: on one of all groups an order that differs by rank is for ever."""
    return f"nccl {link.id}"


def _behind(link: Link, *arrays: Array) -> Any:
    """Return the stream of a group, which does what it is given now after the work that ``arrays`` come from.

    Raises
    ------
    ArrayError
        If one of them is on another device than the group.
    """
    device = _communicators[link.id].device
    for x in arrays:
        if place_of(x) != device:
            raise ArrayError(
                f"{link} works with NCCL on GPU {device}, which was current when the group was made, and got an array"
                f" on GPU {place_of(x)}; copy it there"
            )
    return stream.after(_role(link), arrays[0])


def _apart(x: Array, output: Array) -> Array:
    """Return ``x``, or a copy of it where it lies in the memory of ``output`` or the other way round."""
    shared = array_namespace(x).may_share_memory(x, output)
    return x.copy() if shared else x


def broadcast(link: Link, x: Array, root: int) -> Steps:
    """Copy root's ``x`` to all ranks."""
    side = _behind(link, x)
    _communicators[link.id].broadcast(x, root, side)
    yield stream.mark(side)


def all_gather(link: Link, output: Array, x: Array) -> Steps:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    side = _behind(link, x, output)
    with stream.on(side):
        _communicators[link.id].all_gather(output, _apart(x, output), side)
    yield stream.mark(side)


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks, in place."""
    side = _behind(link, x)
    with stream.on(side):
        premultiply(op, x)
        _communicators[link.id].all_reduce(x, op.name, side)
        finish(op, x, link.size)
    yield stream.mark(side)


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is."""
    side = _behind(link, x)
    with stream.on(side):
        sent = x
        if op.factor is not None and link.rank != root:
            sent = x.copy()
        premultiply(op, sent)
        _communicators[link.id].reduce(x if link.rank == root else None, sent, op.name, root, side)
        if link.rank == root:
            finish(op, x, link.size)
    yield stream.mark(side)


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    side = _behind(link, x, output)
    with stream.on(side):
        x = x.copy() if op.factor is not None else _apart(x, output)
        premultiply(op, x)
        _communicators[link.id].reduce_scatter(output, x, op.name, side)
        finish(op, output, link.size)
    yield stream.mark(side)

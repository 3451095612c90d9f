"""Collectives by NCCL, for groups of ``backend="nccl"`` with a GPU for each rank.

A call queues one kernel of NCCL on the group's stream, behind the program's work, and waits for an event behind it.
Operations that NCCL lacks or defines differently run as in other groups.
"""

from typing import Any

import numpy as np

from mpiddp import device, settings
from mpiddp.algorithms.local_reduce import finish, premultiplied
from mpiddp.device import array_namespace, nccl, stream, synchronize
from mpiddp.device.place import at, place_of
from mpiddp.errors import ArrayError, DistError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array


class Connection(Resource):
    """A group's NCCL communicator, and a stream of its own.

    If groups shared a stream, ranks that call two groups in different orders would deadlock. With streams of their own
    NCCL still does not promise that every order works, so ranks should call all groups in one order.
    """

    def __init__(self, link: Link, number: Any) -> None:
        self.communicator = nccl.Communicator(link.size, number, link.rank)
        self._link, self._role = link, f"nccl {link.id}"

    def after(self, *arrays: Array) -> Any:
        """Return the stream, made to wait for the work queued on the arrays. ArrayError if one is on another device."""
        device = self.communicator.device
        for x in arrays:
            if place_of(x) != device:
                raise ArrayError(
                    f"{self._link} works with NCCL on GPU {device}, which was current when the group was made, and got"
                    f" an array on GPU {place_of(x)}; copy it there"
                )
        return stream.after(self._role, arrays[0])

    def close(self) -> None:
        with at(self.communicator.device):
            synchronize()
            self.communicator.destroy()
        stream.drop(self._role)

    def drop(self, error: DistError) -> None:
        """Abort the communicator, because its pending kernels would wait for ever."""
        self.communicator.abort()
        stream.drop(self._role)


def connect(link: Link, wanted: bool) -> str | None:
    """Connect the group by NCCL if all ranks want that and can; else return the reason. Collective."""
    anybody = np.array([wanted], np.int8)
    link.now.Allreduce(MPI.IN_PLACE, anybody, MPI.MAX)
    if not anybody[0]:
        return "no rank asked for it"
    fault = nccl.fault() if wanted else "another backend was asked for"
    told = link.now.allgather((fault, None if fault else device.choice.device_uuid()))
    for rank, (text, _) in enumerate(told):
        if text is not None:
            return text if rank == link.rank else f"rank {link.ranks[rank]} cannot: {text}"
    first: dict[bytes | None, int] = {}
    for rank, (_, uuid) in enumerate(told):
        if first.setdefault(uuid, rank) != rank:
            return f"ranks {link.ranks[first[uuid]]} and {link.ranks[rank]} share a GPU, and NCCL wants one for each"
    link.own(Connection(link, link.now.bcast(nccl.unique_id() if link.rank == 0 else None)))
    return None


def connected(link: Link) -> bool:
    return link.find(Connection) is not None


def does(operation: str, link: Link, dtype: np.dtype[Any], op: ReduceOp | None) -> bool:
    if not connected(link):
        return False
    if op is None:
        return operation in ("broadcast", "all_gather")
    return not settings.deterministic() and nccl.reduces(dtype, op.name)


def _queue(function: str, link: Link, x: Array, output: Array, op: ReduceOp | None = None, *root: int) -> Steps:
    """Queue a kernel that writes to ``output``; a reduction with a ``root`` writes to the root's output only."""
    found = link[Connection]  # it exists, because only connected groups choose these steps
    side, writes = found.after(x, output), not root or link.rank in root
    with stream.on(side):
        if op is not None:
            x = premultiplied(op, x, in_place=writes and output is x)
        if output is not x and array_namespace(x).may_share_memory(x, output):
            x = x.copy()
        found.communicator.call(function, x, output, side, "" if op is None else op.name, *root)
        if op is not None and writes:
            finish(op, output, link.size)
    yield stream.mark(side)


def broadcast(link: Link, x: Array, root: int) -> Steps:
    return _queue("broadcast", link, x, x, None, root)


def all_gather(link: Link, output: Array, x: Array) -> Steps:
    return _queue("allGather", link, x, output)


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    return _queue("allReduce", link, x, x, op)


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    return _queue("reduce", link, x, x, op, root)


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    return _queue("reduceScatter", link, x, output, op)

"""The work of one rank in a made-up world: what it does by itself in starting, in making groups and in calls."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from mpiddp.algorithms import handshake, hierarchical, native
from mpiddp.algorithms.tags import Tag
from mpiddp.distributed import monitored, new_groups
from mpiddp.faults import monitor
from mpiddp.faults.calls import make_call
from mpiddp.faults.liveness import Liveness
from mpiddp.mpi import world
from mpiddp.mpi.link import Channel
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Driven, drive
from mpiddp.mpi.world import Claims
from mpiddp.shm import segment
from mpiddp.shm.scratch import Scratch

from . import TIMEOUT_S, Comm, default_group, job

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpiddp.mpi.link import Link

MIB = 1 << 20
BLOCK_BYTES = 7


def kept(call: Callable[[], object]) -> int:
    """Return the bytes that a call has allocated and, with what it returns, keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + 0 * id(result)
    finally:
        tracemalloc.stop()


def connect(size: int, per_node: int) -> Link:
    comm: Any = Comm(size, size - per_node, per_node)
    return monitor.connect(job(size, per_node), comm, TIMEOUT_S)


def connecting(size: int, per_node: int) -> Callable[[], object]:
    there = job(size, per_node)
    return lambda: monitor.connect(there, Comm(size, size - per_node, per_node), TIMEOUT_S)  # type: ignore[arg-type]


def starting(size: int, per_node: int) -> Callable[[], object]:
    """Gather the world and compare the claims, unpickling all ranks' answers included."""
    comm: Any = Comm(size, size - per_node, per_node)

    def start() -> object:
        found = world.gather(comm, comm.allgather)
        world.check_claims(comm, Claims(), {})
        return found

    return start


_COLLECTIVES = ("Dup", "Split", "Allgather", "Allreduce", "Iallgather", "Iallreduce", "Ibarrier", "Ibcast")


def collectives(call: Callable[[], object]) -> list[int]:
    """Return the sizes of the communicators in which a call makes its collectives of MPI."""
    with contextlib.ExitStack() as stack:
        watched = [
            stack.enter_context(mock.patch.object(Comm, name, autospec=True, side_effect=getattr(Comm, name)))
            for name in (*_COLLECTIVES, "allgather", "bcast")
        ]
        call()
    return [each.args[0].size for one in watched for each in one.call_args_list]


def meeting(link: Link) -> Callable[[], object]:
    """Do the handshake of a long all-reduce over several nodes, with all that is read from the ranks' entries."""
    x, op = np.zeros(1), ReduceOp.SUM
    call = make_call(link, "all_reduce", (x,), op=op, count=x.size)

    def meet() -> None:
        entries = drive(handshake.exchange(link, call, segment.find(x), op))
        entries.of(link.node_ranks)
        hierarchical.in_place_everywhere(link, entries.segments)

    return meet


def gathering(size: int, ahead: int = 0) -> tuple[Comm, Callable[[], bool]]:
    """Return a communicator, and what receives a block of each rank in it; so many ranks send one more, early."""
    comm = Comm(size, 0, 1)
    link = Channel(tuple(range(size)), 0, comm, comm)  # type: ignore[arg-type]
    block = np.zeros(BLOCK_BYTES, np.uint8)
    comm.arriving = [(rank, Tag.BLOCK, block) for rank in range(1, size)]
    comm.arriving += [(rank, Tag.BLOCK, block) for rank in range(1, ahead + 1)]
    outputs = [(rank, block.copy()) for rank in range(1, size)]
    return comm, Driven(lambda: native._exchange(link, "gather", outputs, ())).Test


def monitored_barrier(group: Any) -> None:
    """Run a monitored barrier on rank 0, whose peers have all come."""
    number, liveness = group._monitored_barriers + 1, group._monitor.job.liveness
    liveness.barriers = {(group._link.id, rank): (number, 0) for rank in group._link.ranks}
    liveness.progress, liveness.send = list, lambda *_: None
    with mock.patch.object(group._link, "rank", 0):
        monitored.monitored_barrier()


def asking(size: int) -> Callable[[], object]:
    """Ask all ranks of a group, none of which has left yet when the last one is asked."""
    comm: Any = Comm(size, 0, 1)
    request = SimpleNamespace(Test=lambda: False)
    comm.Isend = lambda *_: request
    world: Any = SimpleNamespace(thread_multiple=True)
    return lambda: Liveness(comm, world, False).ask(1, range(size))


def crossing(nodes: int, megabytes: int) -> list[int]:
    """Return the bytes of the messages that a rank sends and receives for a piece of a slice."""
    comm = Comm(nodes, 0, 1)
    across = Channel(tuple(range(nodes)), 0, comm, comm)  # type: ignore[arg-type]
    x = np.zeros(megabytes * MIB // 4, np.float32)
    steps = hierarchical._cross(across, x, ReduceOp.SUM, lambda start, stop: x[start:stop], lambda *_: None)
    with contextlib.suppress(StopIteration):
        next(steps)
    return comm.posted


def memory_of_a_group(size: int, per_node: int) -> tuple[int, int, int]:
    """Return the bytes of a new group on this rank: of Python, shared from the start, and of the scratch."""
    watched = mock.patch.object(segment, "_populate", wraps=segment._populate)
    with default_group(size, per_node), watched as populate:
        groups: list[Any] = []
        own = kept(lambda: groups.append(new_groups.new_group()))
        first = len(populate.call_args_list)
        drive(groups[0]._link.resource(Scratch).prepare())
    shared = [each.args[3] for each in populate.call_args_list]
    return own, sum(shared[:first]), sum(shared[first:])

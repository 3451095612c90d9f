"""Made-up worlds: groups of any number of ranks, seen by one of them, in one process and without MPI.

All that this rank does of its own is done, with communicators that give made-up answers at once: every rank answers as
this one does. Rank r is on node r // RANKS_PER_NODE, and this rank is the first one of the last node.
"""

# ruff: noqa: N802 (MPI's names)

from __future__ import annotations

import contextlib
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from mpiddp.distributed import groups
from mpiddp.faults import monitor, this_job
from mpiddp.faults.between_nodes import BetweenNodes
from mpiddp.mpi import world
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.requests import READY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpiddp.distributed.groups import ProcessGroup
    from mpiddp.mpi.world import World

TIMEOUT_S = 60


class Status:
    """Of the message that was probed last."""

    source = tag = size_bytes = 0

    def Get_source(self) -> int:
        return self.source

    def Get_tag(self) -> int:
        return self.tag

    def Get_count(self, _: object) -> int:
        return self.size_bytes


class Message:
    def __init__(self, content: np.ndarray) -> None:
        self._content = content.view(np.uint8)

    def Irecv(self, into: Any) -> Any:
        memory = into[0].reshape(-1).view(np.uint8)
        memory[: self._content.size] = self._content
        return READY


class Comm:
    """A communicator of a made-up world, with ``per_node`` ranks on each node; counts what is asked of it."""

    handle = 1

    def __init__(self, size: int, rank: int, per_node: int) -> None:
        self.size, self.rank, self._per_node = size, rank, per_node
        self._splits = 0
        self.part = 0
        """Ranks of this rank's part in further splits; 0: all."""
        self.probes = 0
        self.posted: list[int] = []
        """Bytes of the messages that this rank has sent or posted receives for."""
        self.arriving: list[tuple[int, int, np.ndarray]] = []
        """Source, tag and content of what probes will find, last first."""

    def Dup(self) -> Comm:
        return Comm(self.size, self.rank, self._per_node)

    def Free(self) -> None:
        pass

    def Split(self, color: int, _: int = 0) -> Comm:
        """The first split of a group of several nodes is that into nodes, the second into local ranks."""
        self._splits += 1
        nodes = self.size // self._per_node
        if nodes > 1 and self._splits == 1:
            return Comm(self._per_node, 0, self._per_node)
        if nodes > 1 and self._splits == 2:
            return Comm(nodes, nodes - 1, 1)
        part = self.part or self.size
        return Comm(part, part - self._per_node, self._per_node)

    def allgather(self, mine: Any) -> list[Any]:
        """Answer with what each rank would have sent."""
        told = []
        for rank in range(self.size):
            theirs = mine
            if hasattr(mine, "host"):
                node = rank // self._per_node
                host = mine.host if node == self.rank // self._per_node else f"node{node}"
                theirs = mine._replace(started_as=rank, host=host, threads=1)
            told.append(pickle.dumps(theirs))
        return [pickle.loads(each) for each in told]

    def Allgather(self, mine: np.ndarray, told: np.ndarray) -> None:
        told[...] = mine
        if told.ndim == 2:  # world ranks, beside how many groups each has made
            told[:, 0] = np.arange(self.size)

    def Iallgather(self, mine: Any, told: Any) -> Any:
        if isinstance(mine, bytes):  # a handshake of arrays that lie elsewhere, word 5
            table = np.frombuffer(told, np.int64).reshape(self.size, -1)
            table[...] = np.frombuffer(mine, np.int64)
            table[1:, 5] += 64
        elif isinstance(told, np.ndarray):
            told[...] = mine
        else:
            told[0][...] = mine[0]
        return READY

    def _at_once(self, *_: object) -> Any:
        return READY

    Allreduce = Iallreduce = Ibcast = Ibarrier = bcast = _at_once

    def Irecv(self, buffer: Any, *_: int) -> Any:
        self.posted.append(buffer.nbytes)
        return READY

    def Isend(self, buffer: Any, *_: int) -> Any:
        self.posted.append((buffer[0] if isinstance(buffer, list) else buffer).nbytes)
        return READY

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:
        self.probes += 1
        if not self.arriving:
            return None
        status.source, status.tag, content = self.arriving.pop()
        status.size_bytes = content.nbytes
        return Message(content)


_MPI: dict[str, Any] = {
    "Intracomm": lambda comm: comm,
    "COMM_NULL": None,
    "Status": Status,
    "Query_thread": lambda: 3,
    "THREAD_MULTIPLE": 3,
    "Exception": OSError,
    "Request": SimpleNamespace(Testall=lambda _: True, Waitall=lambda _: None),
    **dict.fromkeys(("BYTE", "IN_PLACE", "MIN", "MAX", "UNDEFINED", "ANY_SOURCE", "ANY_TAG", "TAG_UB"), -1),
}


@contextlib.contextmanager
def mpi(size: int, rank: int = 0) -> Iterator[None]:
    """Put made-up names in the place of MPI's; the library is neither loaded nor started."""
    names = {**_MPI, "COMM_WORLD": SimpleNamespace(size=size, rank=rank, Get_attr=lambda _: 32767)}
    with mock.patch.dict(vars(MPI), names):
        yield


def gather(size: int, per_node: int) -> World:
    comm: Any = Comm(size, size - per_node, per_node)
    return world.gather(comm, comm.allgather)


def job(size: int, per_node: int) -> Any:
    """Return the job of such a world, which watches nothing."""
    liveness = SimpleNamespace(register=lambda _: None, retire=lambda _: None, links=list, handlers={})
    return SimpleNamespace(
        world=gather(size, per_node),
        failures=SimpleNamespace(survivable=False, happened=lambda: False, translate=lambda _: None),
        liveness=liveness,
        between_nodes=BetweenNodes(liveness),  # type: ignore[arg-type]
        raises=False,
    )


@contextlib.contextmanager
def default_group(size: int, per_node: int) -> Iterator[ProcessGroup]:
    """Make the default group of a world, for as long as the context lasts."""
    with mpi(size, size - per_node):
        made = job(size, per_node)
        comm: Any = Comm(size, size - per_node, per_node)
        link = monitor.connect(made, comm, TIMEOUT_S)
        group = groups.ProcessGroup(link, "made up", made.world.ranks, comm)
        with mock.patch.object(this_job, "current", lambda: made):
            groups.register(group, default=True)
            try:
                yield group
            finally:
                groups.disown(groups.NOT_INITIALIZED)

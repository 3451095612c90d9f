"""A group's link: its communicators, its queue, and its resources.

A group owns duplicates of its communicator: ``now`` for messages at submission, ``later`` for later steps (see `work`),
``messages`` for point to point, whose receives from any source must not match a ring's messages; on several nodes
another pair for this node, and one communicator for equal local ranks. Ranks free them together, in `close`: garbage
collection runs at different times.

Steps call non-blocking collectives only: MPI does not match the two kinds, and both libraries hang.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from mpiddp.errors import DistError, RankFailedError

from . import requests
from .lazy import MPI
from .operation import Members, Monitor
from .work import Queue
from .world import World

T = TypeVar("T", bound="Resource")


class Resource:
    def pending(self) -> int:
        return 0

    def close(self) -> None:
        """Free it; collective, with nothing pending."""

    def drop(self, error: DistError) -> None:
        """Give it up on this rank; MPI may still write to its memory."""


class Channel:
    def __init__(self, ranks: tuple[int, ...], rank: int, now: MPI.Intracomm, later: MPI.Intracomm) -> None:
        self.ranks = ranks
        self.rank, self.size = rank, len(ranks)
        self.now, self.later = now, later
        self.early: dict[int, dict[int, deque[tuple[MPI.Message, int]]]] = {}
        """Blocks of later operations, with their bytes, by communicator and sender."""

    def after(self) -> Self:
        """Return the channel of a later step: all messages use ``later``."""
        changed = copy.copy(self)
        changed.now = self.later
        return changed


class _Aborted:
    def __init__(self, error: DistError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        if isinstance(self._error, RankFailedError):
            raise RankFailedError(str(self._error), self._error.ranks)
        raise type(self._error)(f"{self._error}. The group cannot be used any more: destroy it and make another")


def aborted(error: DistError) -> Any:
    return _Aborted(error)


_created = 0
_abandoned: list[Any] = []
"""Of aborted groups, whose messages may still arrive."""


class Link(Channel):
    """The communicators of one group: three on one node, six on several; collective over ``comm``.

    The link owns ``comm``. ``register`` is called before it makes communicators, which a rank's failure revokes.
    """

    def __init__(
        self,
        world: World,
        comm: MPI.Intracomm,
        timeout_s: float,
        monitor: Monitor,
        register: Callable[[Link], object],
    ) -> None:
        global _created
        _created += 1
        self.world, self.monitor, self.timeout_s = world, monitor, timeout_s
        self.closed = True
        """Also while incomplete."""
        self.may_hold_messages = False
        """Of calls that differed: freed, the communicators would hand them to the next owner of their numbers."""
        self.comms: list[MPI.Comm] = [comm]
        self._resources: dict[type[Resource], Resource] = {}
        self._whole = self  # of a copy, too
        self.sequence = self.message_count = 0
        self.busy = False
        self.queue = Queue()
        register(self)
        try:
            self._connect(comm)
        except BaseException:
            if monitor.survivable:
                _abandoned.append(self.comms)
            else:
                self._free()
            raise
        self.closed = False

    def _connect(self, comm: MPI.Intracomm) -> None:
        # Ranks may have made different numbers of groups.
        made = np.empty((comm.size, 2), np.int64)
        comm.Allgather(np.array([self.world.rank, _created]), made)
        ranks = tuple(map(self.world.ranks.__getitem__, made[:, 0].tolist()))
        super().__init__(ranks, comm.rank, comm, self._own(comm.Dup()))
        self.id = (self.ranks[0] << 40) + int(made[0, 1])
        self.members = Members(self.id, self.ranks, self.world.size, self.timeout_s, self.monitor)
        self.messages = self._own(comm.Dup())
        self.nodes = tuple(self.world.nodes[rank] for rank in self.ranks)
        ranks_per_node = Counter(self.nodes)
        self.node_count = len(ranks_per_node)
        self.one_node = self.node_count == 1
        self.shares_memory = self.node_count < self.size
        self.places = min(ranks_per_node.values())
        """Ranks of each node that take part across nodes: those of the smallest."""
        nodes = np.array(self.nodes)
        self.by_node = np.argsort(nodes, kind="stable")
        self.node_starts = np.flatnonzero(np.diff(nodes[self.by_node], prepend=-1))
        self.node_ranks = np.flatnonzero(nodes == nodes[self.rank])
        self.node: Channel = self if self.one_node else self._same_node()
        self.across: Channel | None = None if self.one_node else self._same_local_rank()
        """None where a node has no such rank."""

    def _free(self) -> None:
        if self.may_hold_messages:
            _abandoned.append(tuple(self.comms))
            self.comms.clear()
        for comm in reversed(self.comms):
            comm.Free()
        self.comms.clear()

    def _own(self, comm: MPI.Comm) -> MPI.Intracomm:
        self.comms.append(comm)
        return MPI.Intracomm(comm)

    def _same_node(self) -> Channel:
        comm = self._own(self.now.Split(self.nodes[self.rank], self.rank))
        ranks = tuple(self.ranks[rank] for rank in self.node_ranks)
        return Channel(ranks, comm.rank, comm, self._own(comm.Dup()))

    def _same_local_rank(self) -> Channel | None:
        local_rank = self.node.rank
        color = local_rank if local_rank < self.places else MPI.UNDEFINED
        comm = self.now.Split(color, self.nodes[self.rank])
        if comm == MPI.COMM_NULL:
            return None
        ranks = tuple(self.ranks[rank] for rank in self.by_node[self.node_starts + local_rank])
        # Only the head of the queue uses it.
        across = self._own(comm)
        return Channel(ranks, across.rank, across, across)

    def __str__(self) -> str:
        return str(self.members)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        return self.ranks[: self.rank] + self.ranks[self.rank + 1 :]

    def resource(self, make: Callable[[Link], T]) -> T:
        """Return the group's instance, made on first use."""
        found = self._resources.get(make)  # type: ignore[call-overload]
        if found is None:
            found = self._resources[make] = make(self._whole)  # type: ignore[index]
        return found  # type: ignore[no-any-return]

    def find(self, kind: type[T]) -> T | None:
        return self._resources.get(kind)  # type: ignore[return-value]

    def own(self, resource: T) -> T:
        self._resources[type(resource)] = resource
        return resource

    def expect_idle(self) -> None:
        requests.poll()
        if len(self.queue) or any(each.pending() for each in self._resources.values()):
            raise DistError(f"{self} has operations that are not finished; wait() for them before it is destroyed")

    def close(self) -> None:
        """Close the resources, last made first, and free the communicators; DistError if operations are pending."""
        if self.closed:
            return
        self.expect_idle()
        for resource in reversed(self._resources.values()):
            resource.close()
        self.closed = True
        self._resources.clear()
        self._free()

    def abort(self, error: DistError) -> None:
        """Let pending operations and further uses raise ``error``."""
        if self.closed:  # a rank failed while others made the group
            return
        aborted_comm = aborted(error)
        for channel in (self, self.node, self.across):
            if channel is not None:
                channel.now = channel.later = aborted_comm
        self.queue.fail(error)
        self._abandon(error)

    def discard(self) -> None:
        """End the group without its other ranks."""
        if self.comms:
            self.queue.fail(error := DistError(f"{self} was given up, with this operation"))
            self._abandon(error)
        self.closed = True

    def _abandon(self, error: DistError) -> None:
        for resource in reversed(self._resources.values()):
            resource.drop(error)
        # A message not received would reach the next owner of its communicator's number.
        _abandoned.append((self.comms, self._resources))
        self.comms, self._resources = [], {}

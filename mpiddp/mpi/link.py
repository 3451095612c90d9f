"""A group's link: its communicators, its queue, and its resources.

A group duplicates its communicator, because a message must not be matched with a receive of another purpose:

- ``now`` carries what an operation sends when it is submitted, ``later`` what its later steps send (see `work`).
- ``messages`` carries point-to-point messages. Their receives from any source would take an algorithm's messages.
- On several nodes there is a second pair of ``now`` and ``later`` for the ranks of this node, and one more
  communicator for the ranks with the same local rank.

The ranks free the communicators together in `Link.close`. Garbage collection would free them at different times on
different ranks.

Steps call non-blocking collectives only. MPI does not match a blocking collective with a non-blocking one; MPICH and
Open MPI hang then.
"""

from __future__ import annotations

import functools
import time
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
    """An object that belongs to a group and is closed with it, such as buffers, plans or the mailbox.

    Most resources are made on first use.
    """

    def pending(self) -> int:
        """Return the number of operations that have not ended."""
        return 0

    def close(self) -> None:
        """Free the resource. All ranks of the group call this, when nothing is pending."""

    def drop(self, error: DistError) -> None:
        """Give up the resource on this rank alone, after ``error``.

        `_abandoned` keeps the resource alive, because MPI may still write to its memory.
        """


class Channel:
    """The pair of communicators, ``now`` and ``later``, of some ranks."""

    def __init__(self, ranks: tuple[int, ...], rank: int, now: MPI.Intracomm, later: MPI.Intracomm) -> None:
        self.ranks = ranks
        self.rank, self.size = rank, len(ranks)
        self.now, self.later = now, later
        self.early: dict[int, dict[int, deque[tuple[MPI.Message, int]]]] = {}
        """Messages that came before their operation's turn, and their sizes in bytes, by communicator and sender."""

    def after(self) -> Self:
        """Return a copy of this channel whose ``now`` is ``later``, too, for an algorithm that runs as a later step."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, now=self.later)  # this takes a tenth of the time of copy.copy
        return changed


class _Aborted:
    """A stand-in for the communicators of an aborted group. Every use of it raises the group's error."""

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
"""Communicators and resources that are not freed, because messages may still arrive. They are of groups that ended in
an error or on one rank alone, and of groups with messages that nobody has received."""


class Link(Channel):
    """The communicators of one group: three on one node, up to six on several. All ranks of ``comm`` make it together.

    The link owns ``comm``. The monitor gets the link before the other communicators are made, so that it can revoke
    them if a rank fails meanwhile.
    """

    def __init__(self, world: World, comm: MPI.Intracomm, timeout_s: float, monitor: Monitor) -> None:
        global _created
        _created += 1
        self.world, self.monitor, self.timeout_s = world, monitor, timeout_s
        self.closed = True
        """True before all communicators are made, and after `close` or `discard`."""
        self.may_hold_messages = False
        """True after calls that differed, and if there are messages that nobody has received. Then `close` does not
        free the communicators, for the reason that `_abandon` gives."""
        self.comms: list[MPI.Comm] = [comm]
        self._resources: dict[type[Resource], Resource] = {}
        self._whole = self  # `after` copies this attribute, so a copy, too, gives the original link to resources
        self.sequence = self.message_count = 0
        self.seen = 0, time.monotonic()
        """The number of the last call that the watchdog has seen, and the time when it first saw it."""
        self.history = 0
        """A hash of the calls that no handshake compares, in a group on several nodes."""
        self.busy = False
        self.queue = Queue()
        monitor.watch(self)
        try:
            self._connect(comm)
        except BaseException:
            if monitor.polls:
                _abandoned.append(self.comms)
            else:
                self._free()
            raise
        self.closed = False

    def _connect(self, comm: MPI.Intracomm) -> None:
        # The group's id has the first rank's count of groups, because the counts of the ranks may differ.
        made = np.empty((comm.size, 2), np.int64)
        comm.Allgather(np.array([self.world.rank, _created]), made)
        ranks = tuple(map(self.world.ranks.__getitem__, made[:, 0].tolist()))
        super().__init__(ranks, comm.rank, comm, self._own(comm.Dup()))
        self.id = (self.ranks[0] << 40) + int(made[0, 1])
        world = self.world
        outer = tuple(world.outer[rank] for rank in self.ranks) if world.outer else ()
        self.members = Members(self.id, self.ranks, world.size, self.timeout_s, self.monitor, outer, self.queue)
        self.messages = self._own(comm.Dup())
        self.nodes = tuple(self.world.nodes[rank] for rank in self.ranks)
        ranks_per_node = Counter(self.nodes)
        self.node_count = len(ranks_per_node)
        self.one_node = self.node_count == 1
        self.shares_memory = self.node_count < self.size
        self.leaders = min(ranks_per_node.values())
        """How many ranks of each node talk to other nodes: as many as the smallest node has."""
        nodes = np.array(self.nodes)
        self.by_node = np.argsort(nodes, kind="stable")
        self.node_starts = np.flatnonzero(np.diff(nodes[self.by_node], prepend=-1))
        self.node_ranks = np.flatnonzero(nodes == nodes[self.rank])
        self.node: Channel = self if self.one_node else self._same_node()
        self.across: Channel | None = None if self.one_node else self._same_local_rank()
        """The ranks with this local rank on all nodes; None on one node, and if some node has no such rank."""

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
        color = local_rank if local_rank < self.leaders else MPI.UNDEFINED
        comm = self.now.Split(color, self.nodes[self.rank])
        if comm == MPI.COMM_NULL:
            return None
        ranks = tuple(self.ranks[rank] for rank in self.by_node[self.node_starts + local_rank])
        # One communicator is enough, because only the operation at the head of the queue uses it.
        across = self._own(comm)
        return Channel(ranks, across.rank, across, across)

    def __str__(self) -> str:
        return str(self.members)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        return self.ranks[: self.rank] + self.ranks[self.rank + 1 :]

    def resource(self, make: Callable[[Link], T]) -> T:
        """Return the group's instance of a class of resources, made on first use."""
        resource = self._resources.get(make)  # type: ignore[call-overload]
        if resource is None:
            resource = self._resources[make] = make(self._whole)  # type: ignore[index]
        return resource  # type: ignore[no-any-return]

    def __getitem__(self, kind: type[T]) -> T:
        """Return a resource that the group is known to have."""
        return self._resources[kind]  # type: ignore[return-value]

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
        if self.closed:  # this happens if a rank fails while the group is being made
            return
        aborted_comm = aborted(error)
        for channel in (self, self.node, self.across):
            if channel is not None:
                channel.now = channel.later = aborted_comm
        self.queue.fail(error)
        self._abandon(error)

    def discard(self) -> None:
        """End the group on this rank alone."""
        if self.comms:
            self.queue.fail(error := DistError(f"{self} was given up, with this operation"))
            self._abandon(error)
        self.closed = True

    def _abandon(self, error: DistError) -> None:
        for resource in reversed(self._resources.values()):
            resource.drop(error)
        # The communicators are not freed: MPI could give their context to a new communicator, which would then receive
        # the messages that are still on their way.
        _abandoned.append((self.comms, self._resources))
        self.comms, self._resources = [], {}

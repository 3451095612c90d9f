"""A group's connections: its communicators, its queue and its mailbox.

A group owns duplicates of its communicator. ``now`` carries what operations send when they are submitted, ``later``
what their later steps send (see `work`), and the mailbox has one for point to point, whose receives from any source
must not meet the messages of a ring. On several nodes, another pair joins the ranks of this node (on one it is the
group's own), and one communicator joins the ranks that have the same place on their nodes. All ranks make them
together, and `close` alone frees them: never garbage collection, whose time differs from rank to rank.

Steps call the non-blocking collectives only, in blocking operations too: MPI does not match the two kinds with each
other (tried: both libraries hang), and whether another rank may block depends on where its program waits.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, NoReturn, Self, TypeAlias

from mpiddp.errors import DistError, MismatchError, RankFailedError
from mpiddp.faults import calls
from mpiddp.faults.calls import Board
from mpiddp.shm import eager, segment
from mpiddp.shm.cma import Attachment
from mpiddp.shm.eager import Slots
from mpiddp.shm.segment import Scratch
from mpiddp.typing import Array

from . import operation, work
from .lazy import MPI
from .message import dtype_code, dtype_layout
from .operation import Operation
from .p2p import Mailbox
from .reduction import ReduceOp
from .work import Queue, Steps
from .world import World


class _Ready:
    """What has happened already."""

    def Test(self) -> bool:  # noqa: N802
        return True

    def Wait(self) -> None:  # noqa: N802
        return None


READY = _Ready()
"""What an algorithm waits for first that does everything at the head of the queue."""


class _Spoilt:
    """In the place of communicators that are of no use any more."""

    def __init__(self, error: DistError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        if isinstance(self._error, RankFailedError):
            raise RankFailedError(str(self._error), self._error.ranks)
        raise type(self._error)(f"{self._error}. The group cannot be used any more: destroy it and make another")


class Channel:
    """Some ranks, and the two communicators on which they run their algorithms.

    Parameters
    ----------
    ranks : tuple of int
        World ranks, in the order of their ranks here.
    rank : int
        This process's place among them.
    now, later : MPI.Intracomm
        For what is sent when an operation is submitted, and for what its later steps send.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, now: MPI.Intracomm, later: MPI.Intracomm) -> None:
        self.ranks = ranks
        """World ranks of the members, in the order of their ranks here."""
        self.rank, self.size = rank, len(ranks)
        self.now, self.later = now, later

    def after(self) -> Self:
        """Return the same for an algorithm that runs as a later step of another one: all is sent on ``later``."""
        changed = copy.copy(self)
        changed.now = self.later
        return changed


AtOnce: TypeAlias = tuple[str, Array | None, ReduceOp | None, int, int]
"""A call that is made at once: name, array, reduction, count and root."""
NO_CALL: AtOnce = ("", None, None, calls.ANY_COUNT, calls.NO_ROOT)

_created = 0
_abandoned: list[MPI.Comm] = []
"""Communicators of groups that were given up, never freed."""


class Link(Channel):
    """The connections of one group of ranks.

    Parameters
    ----------
    world : World
        The running world.
    comm : MPI.Intracomm
        A communicator of the group's ranks, in their order, that the link takes over.
    timeout_s : float
        How long an operation of the group may take, in seconds.

    Notes
    -----
    Collective over the ranks of ``comm``. Three communicators on one node, six on several.
    """

    def __init__(self, world: World, comm: MPI.Intracomm, timeout_s: float) -> None:
        global _created
        _created += 1
        self.world = world
        self.timeout_s = timeout_s
        self.closed = True
        """Whether it cannot be used: it has come to its end, or is not complete yet."""
        self.comms: list[MPI.Comm] = [comm]
        """All communicators that it has."""
        world.deaths.concern_group(self)
        try:
            self._connect(comm)
        except BaseException:
            self._abandon() if world.deaths.happened() else self._free()
            raise
        self.closed = False

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Make the communicators, and what they are for."""
        # Ranks may have made different numbers of groups, so the first member names this one, for all.
        made = comm.allgather((self.world.rank, _created))
        super().__init__(tuple(rank for rank, _ in made), comm.rank, comm, self._own(comm.Dup()))
        self.id = (made[0][0] << 40) + made[0][1]
        self.mailbox = Mailbox(self._own(comm.Dup()))
        self.queue = Queue()
        self.sequence = self.messages = 0
        """Collective operations, and messages, begun on this rank."""
        self.call = NO_CALL
        """What this rank calls, where it calls at once."""
        self.lingers = False
        """Whether it waits in that."""
        self._outer: Operation | None = None
        self.scratch = Scratch()
        """What ordinary arrays pass through on a node."""
        self.attachment = Attachment()
        """How a rank reaches those of the others on its node without."""
        self.nodes = tuple(self.world.nodes[rank] for rank in self.ranks)
        self.one_node = len(set(self.nodes)) == 1
        self.places = min(Counter(self.nodes).values())
        """Ranks of the node that has the fewest: so many of each can take part in what crosses nodes."""
        self.node: Channel = self if self.one_node else self._same_node()
        """The ranks of this node."""
        self.across: Channel | None = None if self.one_node else self._same_place()
        """The ranks with this one's place on their nodes; None where some node has nobody in that place."""
        self.board: Board | None = None
        """What the ranks are calling; None where they share no memory."""
        self.slots: Slots | None = None
        """Through which short arrays go, of a group on one node; None where that cannot be."""
        if self.size > 1:
            self._share()

    def _share(self) -> None:
        """Make the board in memory of the node, in this rank's own where all others are on other nodes, and slots."""
        node, name, memory = self.node, str(self), None
        with_slots = self.one_node and eager.ORDERED
        if len(set(self.nodes)) < self.size:
            region_bytes = calls.REGION_BYTES + eager.REGION_BYTES * with_slots
            memory = work.drive(segment.allocate(node, self, region_bytes)).memory
        if memory is not None:
            self.board = Board(memory, node.ranks, node.rank, name, not self.one_node)
            if with_slots:
                start = calls.REGION_BYTES * self.size
                self.slots = Slots(memory, start, self.rank, self.size, self.later, self._linger, self.look)
        elif not self.one_node:
            alone = self.ranks[self.rank : self.rank + 1]
            self.board = Board(bytearray(calls.REGION_BYTES), alone, 0, name, True)

    def _own(self, comm: MPI.Comm) -> MPI.Intracomm:
        """Keep a new communicator, to be freed with the link."""
        self.comms.append(comm)
        return MPI.Intracomm(comm)

    def _free(self) -> None:
        for comm in reversed(self.comms):
            comm.Free()
        self.comms.clear()

    def _same_node(self) -> Channel:
        mine = self.nodes[self.rank]
        comm = self._own(self.now.Split(mine, self.rank))
        ranks = tuple(rank for rank, node in zip(self.ranks, self.nodes, strict=True) if node == mine)
        return Channel(ranks, comm.rank, comm, self._own(comm.Dup()))

    def _same_place(self) -> Channel | None:
        color = self.node.rank if self.node.rank < self.places else MPI.UNDEFINED
        comm = self.now.Split(color, self.nodes[self.rank])
        if comm == MPI.COMM_NULL:
            return None
        ranks = [
            [rank for rank, node in zip(self.ranks, self.nodes, strict=True) if node == each][self.node.rank]
            for each in sorted(set(self.nodes))
        ]
        # Only steps at the head of the queue use it, so one communicator is enough.
        across = self._own(comm)
        return Channel(tuple(ranks), across.rank, across, across)

    def __str__(self) -> str:
        if self.ranks == tuple(range(self.world.size)):
            return f"the group of all {self.size} ranks"
        return f"the group of ranks {', '.join(map(str, self.ranks))}"

    def count(self) -> int:
        """Count a collective operation, and return its number."""
        self.sequence = sequence = self.sequence + 1
        self.world.presence.sequences[self.id] = sequence  # for peers that ask how far this rank has come
        return sequence

    def begin(self, kind: int, count: int = calls.ANY_COUNT, root: int = calls.NO_ROOT) -> bool:
        """Count a collective operation, and tell whether the ranks of the node are known to make the same call.

        Parameters
        ----------
        kind, count, root : int
            What is called; see `calls`.

        Raises
        ------
        MismatchError
            If one has made another call.
        """
        return self._post(self.count(), kind, count, root)

    def _post(self, sequence: int, kind: int, count: int, root: int) -> bool:
        if self.board is None:
            return True
        try:
            return self.board.post(sequence, kind, count, root)
        except MismatchError as error:
            self.spoil(error)
            raise

    def _linger(self) -> None:
        """Show the watchdog, and ranks that call something else, what this rank waits in: so far only its slot does."""
        if self.call is NO_CALL or self.lingers:  # steps, which were shown before they began, or another piece
            return
        name, x, op, count, root = self.call
        self._outer, operation.running = operation.running, Operation(name, self, x, number=self.sequence)
        self.lingers = True
        dtype = calls.NO_DTYPE if x is None else dtype_code(x.dtype)
        kind = calls.kind(
            name, dtype, calls.NO_REDUCTION if op is None else op.value, "" if x is None else dtype_layout(x.dtype)
        )
        self._post(self.sequence, kind, count, root)

    def rest(self) -> None:
        """Show it no more."""
        self.call = NO_CALL
        if self.lingers:
            operation.running, self._outer, self.lingers = self._outer, None, False

    def note(self, kind: int, count: int, root: int) -> None:
        """Show the last call, which did not wait for other ranks: they may wait for this one in another call."""
        if self.board is not None:
            self.board.write(self.sequence, kind, count, root)

    def confirm(self, sequence: int) -> None:
        """Compare a call that has come to its end with those of the other ranks of the node; raises as `begin`."""
        if self.board is None:
            return
        try:
            self.board.close(sequence)
        except MismatchError as error:
            self.spoil(error)
            raise

    def confirming(self, steps: Steps) -> Steps:
        """Return the same steps, of the operation begun last, which end with a comparison of the calls."""
        sequence = self.sequence
        try:
            value = yield from steps
        except Exception:
            self.confirm(sequence)  # why it went wrong is the better error
            raise
        self.confirm(sequence)
        return value

    def look(self) -> None:
        """Compare the calls that are on their way with those of the other ranks of the node; raises as `begin`."""
        if self.board is None:
            return
        try:
            for sequence in tuple(self.board.open):
                self.board.compare(sequence)
            odd = self.slots.disagreement() if self.slots is not None else None
            if odd is not None:
                mine, rank, call = odd
                raise MismatchError(calls.disagreement(str(self), self.ranks[self.rank], mine, self.ranks[rank], call))
        except MismatchError as error:
            self.spoil(error)
            raise

    def spoil(self, error: MismatchError | RankFailedError) -> None:
        """Give the group up: what its ranks have sent would meet what it was not meant for, or never be received."""
        if self.closed:  # a rank has died while others were making the group, which is nobody's yet
            return
        spoilt: Any = _Spoilt(error)
        for channel in (self, self.node, self.across):
            if channel is not None:
                channel.now = channel.later = spoilt
        if self.slots is not None:
            self.slots = spoilt
        self.queue.fail(error)
        if isinstance(error, RankFailedError):
            self.mailbox.fail(error, spoilt)
        self._abandon()

    def _abandon(self) -> None:
        """Keep the communicators for good."""
        # What has been sent and not received would reach whoever gets their numbers next.
        _abandoned.extend(self.comms)
        self.comms.clear()

    def expect_idle(self) -> None:
        """Raise `DistError` if operations of the group are on their way."""
        work.poll()  # what has finished may not have been noticed
        if len(self.queue) or len(self.mailbox):
            raise DistError(f"{self} has operations that are not finished; wait() for them before it is destroyed")

    def close(self) -> None:
        """Free the communicators; nothing of the group may be on its way.

        Raises
        ------
        DistError
            If something is.
        """
        if self.closed:
            return
        self.expect_idle()
        self._end()
        self._free()

    def discard(self) -> None:
        """End the group, and what is on its way in it, without freeing its communicators."""
        given_up = DistError(f"{self} has been given up, with this operation")
        self.queue.fail(given_up)
        self.mailbox.fail(given_up, _Spoilt(given_up))
        self._end()
        self._abandon()

    def _end(self) -> None:
        self.closed = True
        self.world.presence.retire(self.id)
        self.scratch.close()
        if isinstance(self.slots, Slots):  # not spoilt
            self.slots.close()
        self.board = self.slots = None

"""A group's connections: its communicators, its queue and its mailbox.

A group owns duplicates of its communicator. ``now`` carries what operations send when they are submitted, ``later``
what their later steps send (see `work`), and the mailbox has one for point to point, whose receives from any source
must not meet the messages of a ring. On several nodes, ``node_now`` and ``node_later`` join the ranks of this node; on
one they are the group's own. All ranks make them together, and `close` alone frees them: never garbage collection,
whose time differs from rank to rank.

Steps call the non-blocking collectives only, in blocking operations too: MPI does not match the two kinds with each
other (tried: both libraries hang), and whether another rank may block depends on where its program waits.
"""

from __future__ import annotations

from mpiddp.errors import DistError

from .library import MPI
from .mailbox import Mailbox
from .runtime import World
from .work import Queue

_created = 0


class Link:
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
    Collective over the ranks of ``comm``. Three communicators on one node, five on several.
    """

    def __init__(self, world: World, comm: MPI.Intracomm, timeout_s: float) -> None:
        global _created
        _created += 1
        self.world = world
        self.timeout_s = timeout_s
        self.rank, self.size = comm.rank, comm.size
        # Ranks may have made different numbers of groups, so the first member names this one, for all.
        made = comm.allgather((world.rank, _created))
        self.ranks: tuple[int, ...] = tuple(rank for rank, _ in made)
        """World ranks of the members, in the order of their group ranks."""
        self.id = (made[0][0] << 40) + made[0][1]
        self.nodes = tuple(world.nodes[rank] for rank in self.ranks)
        self.now = comm
        self.later: MPI.Intracomm = comm.Dup()
        self.mailbox = Mailbox(comm.Dup())
        self.queue = Queue()
        self.sequence = 0
        """Collective operations begun on this rank."""
        self.one_node = len(set(self.nodes)) == 1
        self.node_now: MPI.Intracomm = comm if self.one_node else comm.Split(self.nodes[self.rank], self.rank)  # type: ignore[assignment]
        self.node_later = self.later if self.one_node else self.node_now.Dup()
        self.closed = False

    def __str__(self) -> str:
        if self.ranks == tuple(range(self.world.size)):
            return f"the group of all {self.size} ranks"
        return f"the group of ranks {', '.join(map(str, self.ranks))}"

    def begin(self) -> None:
        """Count a collective operation, for peers that ask how far this rank has come."""
        self.sequence += 1
        self.world.presence.sequences[self.id] = self.sequence

    def close(self) -> None:
        """Free the communicators; nothing of the group may be on its way.

        Raises
        ------
        DistError
            If something is.
        """
        if self.closed:
            return
        if len(self.queue) or len(self.mailbox):
            raise DistError(f"{self} has operations that are not finished; wait() for them before it is destroyed")
        self.closed = True
        self.mailbox.close()
        comms = [self.now, self.later]
        if not self.one_node:
            comms += [self.node_now, self.node_later]
        for comm in comms:
            comm.Free()

"""Dead ranks, where the MPI library lets the others live on: how those come to know of it, all of them.

A library with ULFM reports a dead rank to whoever has to do with it, and to nobody else. So who hears of one revokes
the communicators of all its groups: nobody waits in one of them for somebody who has left it, and all that live meet an
error in the operation that they are in, or in their next one. From then on the groups of the job are of no use, until
`runtime.regroup` has made the world anew of those that live.

References
----------
W. Bland et al., "Post-failure recovery of MPI communication capability: Design and rationale", International Journal of
High Performance Computing Applications 27 (3), 2013.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.errors import RankFailedError
from mpiddp.mpi.lazy import MPI

if TYPE_CHECKING:
    from mpiddp.mpi.link import Link

_NEWS_S = 0.2
"""How long it may take until who has heard of a death knows whose it was."""


class Deaths:
    """What this process knows of dead ranks of a world.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of all ranks of the world.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._comms = [comm]
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.survivable = settings.survives() and "Open MPI" in MPI.Get_library_version()
        """Whether the others live on when a rank dies; elsewhere the launcher ends the job.

        Every wait polls then: in MPI, one for a rank that has left the operation would never end.
        """

    def concern(self, comm: MPI.Intracomm) -> None:
        """Let a communicator end with the world that is no part of a group."""
        self._comms.append(comm)

    def concern_group(self, link: Link) -> None:
        """Let a group end with the world, as long as it lives."""
        with self._lock:
            self._links.add(link)

    def happened(self) -> bool:
        """Tell whether a rank is known to be dead, or another one has said so."""
        return self.survivable and (self._comm.Is_revoked() or self._comm.Get_failed().size > 0)

    def ranks(self) -> list[int]:
        """Return the ranks of the world that are known to be dead."""
        failed = self._comm.Get_failed()
        return sorted(MPI.Group.Translate_ranks(failed, range(failed.size), self._comm.group))

    def spread(self) -> None:
        """Let all ranks come to know of it, wherever they wait."""
        with self._lock:  # the watchdog's thread may be the first to know
            comms = [*self._comms, *(comm for link in tuple(self._links) for comm in link.comms)]
            for comm in comms:
                with contextlib.suppress(MPI.Exception):
                    if not comm.Is_revoked():
                        comm.Revoke()

    def look(self) -> None:
        """Raise `RankFailedError` if this process has heard of a death."""
        if self.happened():
            self.meet(RuntimeError("what it had begun will never be finished"))

    def expect_none(self) -> None:
        """Raise `RankFailedError` on all ranks that live, if one does not any more; all of them call it."""
        if not self.survivable:
            return
        try:
            self._comm.Agree(1)
        except MPI.Exception as error:
            self.meet(error)
            raise

    def meet(self, error: BaseException) -> None:
        """Raise what an error means that was met in an operation, if it means that a rank has died.

        Raises
        ------
        RankFailedError
            If it does. All groups are of no use any more.
        """
        if isinstance(error, RankFailedError) or not self.happened():
            return
        self.spread()
        known_by = time.monotonic() + _NEWS_S
        while not (ranks := self.ranks()) and time.monotonic() < known_by:
            MPI.COMM_SELF.Iprobe()  # news come inside of MPI only
            time.sleep(0.001)
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
        met = RankFailedError(f"{who} of {self._comm.size} died", ranks)
        for link in tuple(self._links):
            link.spoil(met)
        raise met from error

"""Failed ranks under an MPI that lets the others live (ULFM).

ULFM reports a failure only to ranks that communicate with the failed rank. These revoke the communicators of all
groups, so that every survivor gets an error. The groups stay unusable. `this_job.regroup` makes the world anew, and the
survivors make new groups in it.

References
----------
W. Bland et al., "Post-failure recovery of MPI communication capability: Design and rationale", IJHPCA 27 (3), 2013.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpiddp import launchers
from mpiddp.errors import RankFailedError
from mpiddp.mpi import library
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.shm.cma import UnreachableError

_NEWS_S = 0.2
"""The longest wait until MPI reports that a rank has failed, or which one."""


T = TypeVar("T")


def _awaited(news: Callable[[], T]) -> T:
    known_by = time.monotonic() + _NEWS_S
    while not (found := news()) and time.monotonic() < known_by:
        MPI.COMM_SELF.Iprobe()  # MPI learns of failures only inside of its calls
        time.sleep(0.001)
    return found


class Failures:
    def __init__(self, comm: MPI.Intracomm, outer: Sequence[int] = (), links: Callable[[], list[Link]] = list) -> None:
        self._comm, self._outer, self._links = comm, outer, links
        self._comms = [comm]
        self._lock = threading.Lock()
        self.survivable = launchers.survives() and library.facts(MPI.Get_library_version()).survives_deaths
        """True if the other ranks live on when one fails; otherwise the launcher ends the job."""

    def register_comm(self, comm: MPI.Intracomm) -> None:
        self._comms.append(comm)

    def happened(self) -> bool:
        """Return True if this rank knows of a failure, or another one does and has revoked the communicator."""
        return self.survivable and (self._comm.Is_revoked() or self._comm.Get_failed().size > 0)

    def awaited(self) -> bool:
        """Wait a moment for news of a failure; return True if they come."""
        return _awaited(self.happened)

    def caused(self, error: BaseException) -> bool:
        """Return True if a failed rank is the cause of ``error``, which may come before MPI reports the failure."""
        if not self.survivable or not isinstance(error, (MPI.Exception, UnreachableError)):
            return self.happened()
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_REVOKED:
            self.revoke()  # another rank knew of the failure first, and has revoked this communicator
        return self.awaited()

    def ranks(self) -> list[int]:
        failed = self._comm.Get_failed()
        return sorted(MPI.Group.Translate_ranks(failed, range(failed.size), self._comm.group))

    def revoke(self) -> None:
        with self._lock:  # two threads may call this, because the watchdog's may be the first to know
            comms = [*self._comms, *(comm for group in self._links() for comm in group.comms)]
            for comm in comms:
                with contextlib.suppress(MPI.Exception):
                    if not comm.Is_revoked():
                        comm.Revoke()

    def raise_if_failed(self) -> None:
        if self.happened():
            self.translate(RuntimeError("an operation that it had begun will never finish"))

    def agree(self) -> None:
        """Raise `RankFailedError` on all survivors if a rank has failed; collective."""
        if not self.survivable:
            return
        try:
            self._comm.Agree(1)
        except MPI.Exception as error:
            self.translate(error)
            raise

    def translate(self, error: BaseException) -> None:
        """Raise `RankFailedError` and abort all groups, if a failed rank is the cause."""
        if isinstance(error, RankFailedError) or not self.caused(error):
            return
        self.revoke()
        ranks = _awaited(self.ranks)
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
        if self._outer and ranks:
            who += f" ({', '.join(str(self._outer[rank]) for rank in ranks)} of the world)"
        failed = RankFailedError(f"{who} of {self._comm.size} died", ranks)
        for group in self._links():
            group.abort(failed)
        raise failed from error

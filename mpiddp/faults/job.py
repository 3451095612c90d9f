"""The job: the running ranks of a communicator, with their liveness and failures.

The communicator is MPI's world, or one that the program has given. All that a job does between its ranks goes over
duplicates of it, so that no other rank of MPI's world takes part.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from mpiddp.mpi import finalize, world
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.world import World

from .between_nodes import BetweenNodes
from .dumps import Dumps
from .failures import Failures
from .liveness import Liveness
from .meeting import Meeting
from .reports import Reports


class Job(NamedTuple):
    world: World
    liveness: Liveness
    failures: Failures
    between_nodes: BetweenNodes
    reports: Reports
    own: bool
    """True if the program has given the communicator. Such a job ends with its default group."""
    raises: bool
    """True if a timeout, a mismatch or a lost rank raises an error on all ranks. Otherwise the watchdog of a rank that
    waits ends the program."""

    @classmethod
    def gather(cls, comm: MPI.Intracomm, gathered: World, own: bool, raises: bool) -> Self:
        """Return the job of ``comm``, whose ranks ``gathered`` describes. Collective."""
        liveness = Liveness(comm.Dup(), gathered, raises)
        failures = Failures(comm, gathered.outer, liveness.known)
        failures.register_comm(liveness.comm)
        reports = Reports(liveness, Dumps(liveness, gathered).collect)
        return cls(gathered, liveness, failures, BetweenNodes(liveness), reports, own, raises)

    @classmethod
    def start(cls, comm: MPI.Intracomm, own: bool, raises: bool, limit_s: float) -> Self:
        """Return the job of all living ranks of ``comm``; collective. DistTimeoutError after ``limit_s``."""
        meeting = Meeting(comm, limit_s)
        with meeting.held():
            if not Failures(comm).survivable:
                made = meeting.duplicate()
                return cls.gather(made, world.gather(made, lambda value: meeting.allgather(made, value)), own, raises)
            meeting.gather()
        job = cls._of_survivors(comm, own, raises)
        if job.world.size < comm.size:
            finalize.finalizes = False
        return job

    def end(self, together: bool) -> None:
        """Free the communicators, if the other ranks do so together; else tell them that this rank has left."""
        if together and self.liveness.part():
            self.world.comm.Free()
        else:
            self.liveness.leave()

    def survivors(self) -> Self:
        """Revoke all communicators, and return the job of the survivors, which call this together."""
        self.failures.revoke()
        # The launcher's barrier in MPI_Finalize may wait for failed ranks for ever.
        finalize.finalizes = False
        return self._of_survivors(self.world.comm, self.own, self.raises, ended=self.liveness.exited)

    @classmethod
    def _of_survivors(cls, comm: MPI.Intracomm, own: bool, raises: bool, *, ended: bool = False) -> Self:
        while True:
            comm = MPI.Intracomm(comm.Shrink())
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                return cls.gather(comm, world.gather(comm, comm.allgather, ended=ended), own, raises)
            except Exception:
                # Another rank may have failed meanwhile. A call that a failure interrupts may also return success, with
                # wrong bytes. A rank with such a call gets here by a later error.
                if not Failures(comm).awaited():
                    raise
                comm.Revoke()

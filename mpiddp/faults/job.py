"""The job: the running world, with the liveness and the failures of its ranks."""

from __future__ import annotations

from typing import NamedTuple, Self

from mpiddp.mpi import finalize, world
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.requests import All
from mpiddp.mpi.world import World

from .between_nodes import BetweenNodes
from .dumps import Dumps
from .failures import Failures
from .liveness import Liveness
from .reports import Reports


class Job(NamedTuple):
    world: World
    liveness: Liveness
    failures: Failures
    between_nodes: BetweenNodes
    reports: Reports

    @classmethod
    def gather(cls, comm: MPI.Intracomm, *, ended: bool = False) -> Self:
        """Gather the ranks of ``comm``; ``ended``: this rank's program has ended."""
        gathered = world.gather(comm, ended=ended)
        failures, questions = Failures(comm), comm.Dup()
        failures.register_comm(questions)
        All.one_by_one = failures.survivable
        liveness = Liveness(questions, gathered)
        reports = Reports(liveness, Dumps(liveness, gathered).collect)
        return cls(gathered, liveness, failures, BetweenNodes(liveness), reports)

    @classmethod
    def start(cls) -> Self:
        """Return the job of all living ranks; collective."""
        comm = MPI.COMM_WORLD
        if not Failures(comm).survivable:
            return cls.gather(comm.Dup())
        job = cls._of_survivors(comm)
        if job.world.size < comm.size:
            finalize.never_finalize()
        return job

    def survivors(self) -> Self:
        """Revoke the world; collective over the survivors."""
        self.failures.revoke()
        # The launcher's barrier in MPI_Finalize may wait for failed ranks for ever.
        finalize.never_finalize()
        return self._of_survivors(self.world.comm, ended=self.liveness.exited)

    @classmethod
    def _of_survivors(cls, comm: MPI.Intracomm, *, ended: bool = False) -> Self:
        while True:
            comm = MPI.Intracomm(comm.Shrink())
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                return cls.gather(comm, ended=ended)
            except Exception:
                # Another rank failed. A call that this cuts may return success, with wrong bytes; a rank that has not
                # noticed comes here later.
                if not Failures(comm).awaited():
                    raise
                comm.Revoke()

"""The end of a rank's program, at exit or in MPI.Finalize. The rank answers the others until all have ended theirs."""

import os
import socket
import time
from collections.abc import Callable

from mpiddp import settings
from mpiddp.errors import EXIT_MISMATCH, EXIT_TIMEOUT, DistError
from mpiddp.mpi import requests
from mpiddp.mpi.finalize import exit_limit, running
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.processes import state

from . import abort as ending, marker
from .abort import abort, say, set_this_rank
from .job import Job
from .liveness import NO_GROUP, Tag
from .uncaught import interrupt

# Time for each unfinished operation, when every program has ended.
_REST_S = 5.0
_PAUSE_S, _QUESTIONS = 10.0, 4

limit_s: float | None = None
"""The time limit of the waits at the end of the program; None stands for the default."""


class Leaving:
    """The end of this program. It waits for the ends of all ranks' programs, and then calls ``stop``."""

    def __init__(self, jobs: list[Job], stop: Callable[[], object]) -> None:
        self._jobs, self._stop = jobs, stop
        """The job of the world, and behind it the job of the program's own communicator, if there is one."""
        self._ended, self._pid = False, os.getpid()
        # MPI_Finalize first deletes COMM_SELF's attributes, while MPI still works.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._end_groups())
        MPI.COMM_SELF.Set_attr(key, self)

    def __call__(self) -> None:
        if self._ended or os.getpid() != self._pid or not running():
            return
        self._ended = True
        try:
            longest_s = settings.default_timeout_s() if limit_s is None else limit_s
            for each in self._jobs:
                each.liveness.exited = True
            for index in reversed(range(len(self._jobs))):
                while not self._wait(self._jobs[index], longest_s):
                    with exit_limit(longest_s):
                        self._jobs[index] = self._jobs[index].survivors()
                    set_this_rank(self._jobs[index].world.comm)
        except KeyboardInterrupt:
            interrupt("its program has ended; ", None)
        marker.end(ending.this_rank.rank)  # a survivor may be rank 0 now
        self._stop()

    def _end_groups(self) -> None:
        """Let later calls, such as a destructor's, raise an error. In MPI they would end the process."""
        self()
        for link in (link for job in self._jobs for link in job.liveness.links()):
            link.abort(DistError("MPI has been finalised"))

    def _wait(self, job: Job, limit_s: float) -> bool:
        """Wait until the programs of all ranks have ended; return False if a rank failed meanwhile."""
        try:
            self._wait_for_all(job, limit_s)
            # The ranks agree, because some may have passed the barrier before a rank failed. These would go on to
            # MPI_Finalize, and the others would wait for them.
            with exit_limit(limit_s):
                job.failures.agree()
        except Exception as error:
            if not job.failures.caused(error):
                raise
            return False
        return True

    def _wait_for_all(self, job: Job, limit_s: float) -> None:
        liveness, neighbour = job.liveness, Neighbour(job, limit_s)
        barrier = job.world.comm.Ibarrier()
        pause_s, deadline, pending = 1e-5, 0.0, -1
        while True:
            # Both are polled, because other ranks may wait for operations that this one has submitted.
            together, finished = barrier.Test(), requests.finished()
            if together and finished:
                break
            if Tag.LEFT in liveness.heard:
                return  # a rank has left its group for a reason that all ranks know, and does not come
            if not together or requests.pending != pending:
                deadline, pending = time.monotonic() + _REST_S, requests.pending
            if time.monotonic() > deadline:
                say(
                    "the program ended with asynchronous operations that no other rank takes part in: an isend that"
                    " nobody received, or a collective that only some ranks submitted; wait() for every Work"
                )
                break
            for each in self._jobs:
                each.liveness.progress()
            if silence := neighbour.silence():
                if job.raises:
                    say(f"its program has ended, and {silence}")
                    return
                abort(f"its program has ended, and {silence}", EXIT_TIMEOUT, "a missing rank")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05 if finished else 0.001)
        with exit_limit(limit_s):
            different = job.between_nodes.settle()
        unheard = (link.monitor.unheard() for link in liveness.links())
        error = different or next(filter(None, unheard), None)
        if error is not None and job.raises:
            say(f"{type(error).__name__}: {error}")
        elif error is not None:
            abort(f"{type(error).__name__}: {error}", EXIT_MISMATCH)


class Neighbour:
    """The next rank of the job, which a rank asks for signs of life while it waits for the end of others' programs.

    Such a wait may last as long as programs run, so no time limit fits it. It would never end if a rank were gone. The
    rank before the missing one notices that, once it waits for the end of programs itself.
    """

    def __init__(self, job: Job, limit_s: float) -> None:
        self._liveness, self._world, self._limit_s = job.liveness, job.world, limit_s
        self._rank = (job.world.rank + 1) % job.world.size
        self._pause_s = min(_PAUSE_S, limit_s / _QUESTIONS)
        self._asked, self._unanswered = time.monotonic(), 0

    def silence(self) -> str:
        """Return a report if the rank has not answered for the time limit, else "". A wait calls this repeatedly."""
        now = time.monotonic()
        # Without MPI_THREAD_MULTIPLE a rank that computes cannot answer.
        if not self._world.thread_multiple or now < self._asked + self._pause_s:
            return ""
        # Unanswered questions are counted, and not the time, because the whole job may have been suspended.
        heard = self._liveness.answer(NO_GROUP, self._rank)
        self._unanswered = 0 if heard else self._unanswered + 1
        if self._unanswered * self._pause_s > self._limit_s and not self._runs_here():
            return f"rank {self._rank} has not answered for {self._limit_s:g} s (dead, stopped, or out of reach)"
        self._asked = now
        self._liveness.ask(NO_GROUP, [self._rank])
        return ""

    def _runs_here(self) -> bool:
        """Return True if the rank runs on this host. It may be in a long call that holds the interpreter's lock."""
        same_host = self._world.hosts[self._rank] == socket.gethostname()
        return same_host and state(self._world.pids[self._rank]) not in "ZXT"

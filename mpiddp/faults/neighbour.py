"""The next rank of the job, which a rank asks for signs of life while it waits for the end of others' programs.

Such a wait may last as long as programs run, so no time limit fits it. A rank that is gone would never end it.
"""

from __future__ import annotations

import socket
import time

from mpiddp.mpi.processes import state

from .job import Job
from .liveness import NO_GROUP

_PAUSE_S, _QUESTIONS = 10.0, 4


class Neighbour:
    """The rank before one that is gone misses it, once it waits."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self._liveness, self._world, self._limit_s = job.liveness, job.world, limit_s
        self._rank = (job.world.rank + 1) % job.world.size
        self._pause_s = min(_PAUSE_S, limit_s / _QUESTIONS)
        self._asked, self._unanswered = time.monotonic(), 0

    def silence(self) -> str:
        """Return a report if the rank has not answered for the time limit, else ""; call it again and again."""
        now = time.monotonic()
        # Without threads a rank that computes cannot answer.
        if not self._world.thread_multiple or now < self._asked + self._pause_s:
            return ""
        # Questions count, not the time: the whole job may have been suspended.
        heard = self._liveness.answered(NO_GROUP, self._rank)
        self._unanswered = 0 if heard else self._unanswered + 1
        if self._unanswered * self._pause_s > self._limit_s and not self._runs_here():
            return f"rank {self._rank} has not answered for {self._limit_s:g} s (dead, stopped, or out of reach)"
        self._asked = now
        self._liveness.ask(NO_GROUP, [self._rank])
        return ""

    def _runs_here(self) -> bool:
        """Return True if the rank runs on this host: it may be in a long call that keeps the interpreter."""
        same_host = self._world.hosts[self._rank] == socket.gethostname()
        return same_host and state(self._world.pids[self._rank]) not in "ZXT"

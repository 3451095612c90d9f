"""The job of this process.

The job of MPI's world is started once, is made anew after failures, and outlives process groups. The job of a
communicator of the program ends with its default group.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sysconfig
import warnings
from threading import get_ident

from mpiddp import launchers
from mpiddp.errors import DistError, SetupError
from mpiddp.mpi import recorder, requests, world
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.world import Claims
from mpiddp.shm import segment

from . import abort, marker, uncaught
from .job import Job
from .leaving import Leaving
from .watchdog import Watchdog

FORKED = (
    "this process was forked from one in which MPI had started, and MPI is not fork safe: use threads (the workers of"
    " mpiddp.data.DataLoader are threads), or start processes before init_process_group"
)
_jobs: list[Job] = []
"""The job of MPI's world, and behind it the job of the program's own communicator, if there is one. As long as there is
one, the job of the world rests."""
_owner_pid = 0
_leaving: Leaving | None = None
_watching = contextlib.ExitStack()
"""Ends the watchdog, if there is one."""
_outer_ranks = contextlib.ExitStack()
"""Restores the environment variables that a communicator's job has replaced."""


def current() -> Job | None:
    """Return the job, or None before `start`; DistError in a forked child."""
    if _jobs and os.getpid() != _owner_pid:
        raise DistError(FORKED)
    return _jobs[-1] if _jobs else None


def start(claims: Claims | None = None, comm: MPI.Intracomm | None = None, timeout_s: float = math.inf) -> Job:
    """Start MPI if necessary, check the launch, and return this process's job.

    If a job runs, it is returned, and made anew first if a rank has failed. If none runs, a job of ``comm`` is started,
    or of the world if ``comm`` is None. A job of ``comm`` is also started while only the job of the world runs.

    DistError if environment, launcher or claims contradict MPI, after MPI_Finalize, in a forked child, or without
    Python's global lock. If errors are raised on all ranks, DistTimeoutError if the other ranks have not come after
    ``timeout_s``.
    """
    global _owner_pid
    job, claims = current(), claims or Claims()
    if job is None or (comm is not None and not job.own):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise SetupError(
                "mpiddp needs Python's global interpreter lock, which orders its stores to shared memory, and this"
                " Python is a free-threaded build; use a build of the same version with the lock"
            )
        uncaught.install()
        world.start_mpi()
        given = MPI.COMM_WORLD if comm is None else comm
        abort.set_this_rank(given)
        _owner_pid = os.getpid()
        requests.only_thread = 0 if MPI.Query_thread() == MPI.THREAD_MULTIPLE else get_ident()
        raises = claims.on_error == "raise"
        job = _begin(Job.start(given, comm is not None, raises, timeout_s if raises else math.inf))
        if job.own:
            before = {name: os.environ[name] for name in launchers.RANKS if name in os.environ}
            _outer_ranks.callback(os.environ.update, before)
            for name in launchers.RANKS:  # called before the update, because an ExitStack calls in reverse order
                _outer_ranks.callback(os.environ.pop, name, None)
        if job.world.size < given.size:
            _correct_ranks(job)
    elif job.failures.happened():
        job = regroup()
    try:
        if len(job.world.running) == job.world.size:
            # The variables that a launcher or a site has set are about the world, not about a communicator.
            told = {} if job.own else launchers.rank_variables()
            world.check_claims(job.world.comm, claims, told)
    except MPI.Exception as error:
        job.failures.translate(error)
        raise
    _correct_ranks(job)
    return job


def _correct_ranks(job: Job) -> None:
    launchers.correct_ranks(job.world.rank, job.world.size, job.world.local_rank)


def regroup() -> Job:
    """Make the job anew; collective over the survivors."""
    _watching.close()
    job = _begin(_jobs.pop().survivors())
    _correct_ranks(job)
    return job


def end(together: bool) -> None:
    """End the job of a communicator; the job of the world goes on.

    Ranks that call this ``together`` free the job's communicators. If a rank has failed or does not come, nothing is
    freed, and no error is raised.
    """
    if not _jobs or not _jobs[-1].own:
        return
    _watching.close()
    _jobs.pop().end(together)
    _outer_ranks.close()
    if _jobs:
        _begin(_jobs.pop())
    else:
        abort.reports = None
        abort.set_this_rank(MPI.COMM_WORLD)


def _begin(job: Job) -> Job:
    global _leaving
    if _leaving is None:
        _leaving = Leaving(_jobs, _watching.close)
        atexit.register(_leaving)
    _watching.close()
    _jobs.append(job)
    recorder.ring.clear()  # its entries name ranks by their old numbers
    segment.forget()
    abort.reports = job.reports
    abort.set_this_rank(job.world.comm)
    why = why_unwatched(job)
    watched = job.world.size > 1 and not why
    marker.begin(job.world.rank, watched)
    if watched:
        _watching.callback(Watchdog(job, _jobs[:-1]).stop)
    elif why and job.world.rank == 0:
        warnings.warn(f"no watchdog runs: {why}; a hang inside of MPI is not noticed", stacklevel=5)
    return job


def why_unwatched(job: Job) -> str:
    if job.world.size == 1 or job.world.thread_multiple:
        return ""
    level = world.thread_level()
    if level == "MULTIPLE":
        return "another rank's MPI runs without MPI_THREAD_MULTIPLE"
    return f"MPI runs with MPI_THREAD_{level}, as the program or mpi4py.rc asked, or the MPI library offers no more"

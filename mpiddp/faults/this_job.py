"""The job of this process: started once, made anew after failures; it outlives process groups."""

from __future__ import annotations

import atexit
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

_job: Job | None = None
_owner_pid = 0
_leaving: Leaving | None = None


def current() -> Job | None:
    """Return the job, or None before `start`; DistError in a forked child."""
    if _job is not None and os.getpid() != _owner_pid:
        raise DistError(
            f"this process was forked from rank {_job.world.rank} after MPI had started, and MPI is not fork safe; use"
            " threads (DataLoader's workers are threads), or start processes before init_process_group"
        )
    return _job


def start(claims: Claims | None = None) -> Job:
    """Start MPI if necessary, check the launch, and return the job, always the same.

    DistError if environment, launcher or claims contradict MPI, after MPI_Finalize, in a forked child, or without
    Python's global lock.
    """
    global _owner_pid
    job = current()
    if job is None:
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise SetupError(
                "mpiddp needs Python's global interpreter lock, which orders its stores to shared memory, and this"
                " Python is a free-threaded build; use a build of the same version with the lock"
            )
        uncaught.install()
        world.start_mpi()
        abort.set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        _owner_pid = os.getpid()
        requests.only_thread = 0 if MPI.Query_thread() == MPI.THREAD_MULTIPLE else get_ident()
        job = _begin(Job.start())
        if job.world.size < MPI.COMM_WORLD.size:
            _renumber(job)
    elif job.failures.happened():
        job = regroup()
    try:
        if len(job.world.running) == job.world.size:
            world.check_claims(job.world.comm, claims or Claims())
    except MPI.Exception as error:
        job.failures.translate(error)
        raise
    launchers.correct_ranks(job.world.rank, job.world.size, job.world.local_rank)
    return job


def regroup() -> Job:
    """Make the job anew; collective over the survivors."""
    assert _job is not None and _leaving is not None
    _leaving.stop()
    job = _begin(_job.survivors())
    recorder.clear()
    segment.forget()
    _renumber(job)
    return job


def _renumber(job: Job) -> None:
    abort.set_rank(job.world.rank, job.world.size)
    launchers.correct_ranks(job.world.rank, job.world.size, job.world.local_rank)


def _begin(job: Job) -> Job:
    global _job, _leaving
    _job = job
    if _leaving is None:
        _leaving = Leaving()
        atexit.register(_leaving)
    _leaving.job, _leaving.stop = job, lambda: None
    abort.report_by(job.reports)
    why = why_unwatched(job)
    watched = job.world.size > 1 and not why
    marker.begin(job.world.rank, watched, job.failures.survivable)
    if watched:
        _leaving.stop = Watchdog(job).stop
    elif why and job.world.rank == 0:
        warnings.warn(f"no watchdog runs: {why}; a hang inside of MPI is not noticed", stacklevel=5)
    return job


def why_unwatched(job: Job) -> str:
    if job.world.size == 1 or job.world.thread_multiple:
        return ""
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    level = levels.get(MPI.Query_thread())
    if level is None:
        return "another rank's MPI runs without MPI_THREAD_MULTIPLE"
    return f"MPI runs with MPI_THREAD_{level}, as the program or mpi4py.rc asked, or the MPI library offers no more"

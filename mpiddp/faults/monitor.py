"""The monitor: what `mpiddp.faults` knows, behind the `Monitor` protocol of `mpiddp.mpi`.

`start` makes the process's one `Job`, which outlives process groups.
"""

from __future__ import annotations

import atexit
import os
import sysconfig
import time
import warnings
from threading import get_ident

from mpiddp import settings
from mpiddp.errors import DistError, MismatchError, SetupError
from mpiddp.mpi import recorder, requests, world
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.p2p import Mailbox
from mpiddp.mpi.requests import Steps, drive
from mpiddp.mpi.world import Claims
from mpiddp.shm import eager, segment
from mpiddp.shm.eager import EagerBuffers

from . import calls, marker, shutdown
from .calls import Calls, Record
from .distant import Comparison
from .job import Job
from .watchdog import Watchdog

_MAX_MESSAGES = 4
_TOLD_S, _PUBLISHED_S = 5.0, 1.0
"""For other nodes to tell of a mismatch; for a rank of this node to publish the call that has caused an MPI error."""


class GroupMonitor(Resource):
    def __init__(self, job: Job) -> None:
        self._job = job
        self.survivable = job.failures.survivable
        self._link: Link | None = None
        self._calls: Calls | None = None
        self._eager: EagerBuffers | None = None
        self._comparison: Comparison | None = None
        self._told: MismatchError | None = None
        self._unheard: MismatchError | None = None
        self.differed = False
        """Calls have differed, and messages may be left that no rank receives."""

    def attach(self, link: Link) -> None:
        """Publish the group's calls, in memory of the node where ranks can share some; collective."""
        self._link = link
        link.own(self)
        self._job.liveness.register(link)
        if link.size == 1:
            return
        eager_bytes = eager.region_bytes(link)
        memory = None
        if link.shares_memory:
            found: segment.Allocation = drive(segment.allocate(link.node, link, calls.REGION_BYTES + eager_bytes))
            memory = found.memory
        self._calls = link.own(Calls(link, bytearray(calls.REGION_BYTES) if memory is None else memory))
        if memory is not None and eager_bytes:
            self._eager = link.own(EagerBuffers(link, memory, calls.REGION_BYTES * link.size))
        self._comparison = self._job.distant.watch(link, self._calls, self._be_told)

    def _be_told(self, error: MismatchError) -> None:
        self._told = error

    def publish(self, sequence: int, call: Record) -> bool:
        """Return True if all ranks are known to make the same call; a MismatchError aborts the group."""
        if self._calls is None:
            return True
        try:
            if self._told is not None:
                raise self._told
            return self._calls.publish(sequence, call) and self._comparison is None
        except MismatchError as error:
            self._abort(error)
            raise

    def publish_unawaited(self, sequence: int, call: Record) -> None:
        if self._calls is not None:
            try:
                self._calls.publish_unawaited(sequence, call)
            except MismatchError as error:
                self._abort(error)
                raise

    def verify(self, sequence: int) -> None:
        """Compare a finished call for the last time."""
        if self._calls is not None:
            try:
                self._calls.verify(sequence)
            except MismatchError as error:
                self._abort(error)
                raise

    def verify_failed(self, sequence: int, error: Exception) -> None:
        """Raise the mismatch behind an error, if any: it is the better reason."""
        self._job.failures.translate(error)
        self.differed |= isinstance(error, MismatchError)
        may_tell_more = isinstance(error, calls.UnknownCallError)
        may_tell_more |= isinstance(error, calls.BlockError) and self._comparison is not None
        if may_tell_more or not isinstance(error, MismatchError):
            self._await_told(error)
        self.verify(sequence)

    def _await_told(self, error: BaseException) -> None:
        """Give other ranks time to publish or tell of a mismatch; raises it."""
        limit_s = 0.0
        if self._comparison is not None:
            limit_s = _TOLD_S
        elif self._calls is not None and isinstance(error, (MPI.Exception, calls.UnknownCallError)):
            limit_s = _PUBLISHED_S
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_PUBLISHED_S / 20)

    def verifying(self, sequence: int, steps: Steps) -> Steps:
        try:
            try:
                value = yield from steps
            except Exception as error:
                self.verify_failed(sequence, error)
                raise
            self.verify(sequence)
        except MismatchError as error:
            self._unheard = error
            raise
        return value

    def unheard(self) -> MismatchError | None:
        """Return the error of calls that differ if the program has not been told."""
        return self._unheard or self.disagreement()

    def disagreement(self) -> MismatchError | None:
        link, published, buffers = self._link, self._calls, self._eager
        if self._told is not None:
            return self._told
        try:
            if published is not None:
                published.check()
            if buffers is not None and link is not None:
                calls.compare_eager(link, buffers.calls())
        except MismatchError as error:
            return error
        return None

    def check(self) -> None:
        """Raise if a rank has failed, or ranks make different calls."""
        self._job.failures.raise_if_failed()
        error = self.disagreement()
        if error is not None:
            self._abort(error)
            raise error

    def explain(self, operation: Operation) -> str:
        unmatched = self.unmatched()
        return self._job.reports.explain(operation) + (f"\n  {unmatched}" if unmatched else "")

    def unmatched(self) -> str:
        mailbox = None if self._link is None else self._link.find(Mailbox)
        try:
            found = [] if mailbox is None else mailbox.unmatched()
        except (MPI.Exception, DistError):  # the group has been aborted
            found = []
        if self._link is None or not found:
            return ""
        some = [
            f"from rank {self._link.ranks[source]} with tag {tag} ({size} bytes of {dtype})"
            for source, tag, dtype, size in found[:_MAX_MESSAGES]
        ]
        more = f", and {len(found) - len(some)} more" if len(found) > len(some) else ""
        lie = "a message lies" if len(found) == 1 else "messages lie"
        return f"here {lie} that no receive has taken: {', '.join(some)}{more}"

    def translate(self, error: BaseException) -> None:
        self._unheard = None
        self._job.failures.translate(error)
        if isinstance(error, MPI.Exception):
            self._await_told(error)

    def _abort(self, error: DistError) -> None:
        if self._link is not None:
            if self._comparison is not None and isinstance(error, MismatchError) and error is not self._told:
                self._job.distant.tell(self._link.id, error)
            self._link.abort(error)

    def close(self) -> None:
        """Retire the group: peers may be in its last operation."""
        if self._link is not None:
            self._job.liveness.retire(self._link)
            recorder.retire(self._link)
        self._calls = self._eager = self._comparison = self._told = None

    def drop(self, error: DistError) -> None:
        self.close()


def connect(job: Job, comm: MPI.Intracomm, timeout_s: float) -> tuple[Link, GroupMonitor]:
    """Return a group's link, which owns ``comm``, and monitor; collective."""
    monitor = GroupMonitor(job)
    link = Link(job.world, comm, timeout_s, monitor, register=job.failures.register)
    try:
        monitor.attach(link)
    except BaseException:
        link.discard()
        raise
    return link, monitor


_job: Job | None = None
_owner_pid = 0
_shutdown: shutdown.Shutdown | None = None


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
        shutdown.install()
        world.start_mpi()
        shutdown.set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
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
    settings.correct_ranks(job.world.rank, job.world.size, job.world.local_rank)
    return job


def regroup() -> Job:
    """Make the job anew; collective over the survivors."""
    assert _job is not None and _shutdown is not None
    _shutdown.stop()
    job = _begin(_job.survivors())
    recorder.clear()
    segment.forget()
    _renumber(job)
    return job


def _renumber(job: Job) -> None:
    shutdown.set_rank(job.world.rank, job.world.size)
    settings.correct_ranks(job.world.rank, job.world.size, job.world.local_rank)


def _begin(job: Job) -> Job:
    global _job, _shutdown
    _job = job
    if _shutdown is None:
        _shutdown = shutdown.Shutdown()
        atexit.register(_shutdown)
    _shutdown.job, _shutdown.stop = job, lambda: None
    shutdown.report_by(job.reports)
    why = why_unwatched(job)
    watched = job.world.size > 1 and not why
    marker.begin(job.world.rank, watched, job.failures.survivable)
    if watched:
        _shutdown.stop = Watchdog(job).stop
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

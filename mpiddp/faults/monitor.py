"""A group's monitor: it implements the `Monitor` protocol of `mpiddp.mpi` by the modules of `mpiddp.faults`."""

from __future__ import annotations

import time

from mpiddp.errors import DistError, DistTimeoutError, MismatchError
from mpiddp.mpi import fifo
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.p2p import Mailbox
from mpiddp.mpi.requests import Steps, drive
from mpiddp.shm import eager, segment
from mpiddp.shm.eager import EagerBuffers

from . import calls
from .between_nodes import Comparison
from .calls import Calls, Record
from .job import Job

_MAX_MESSAGES = 4
_TOLD_S, _PUBLISHED_S = 5.0, 1.0
"""Time for other nodes to tell of a mismatch, and for a rank of this node to publish the call that made MPI fail."""


class GroupMonitor(Resource):
    _link: Link
    """The group's link. `watch` sets it while the group is being made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.survivable = job.failures.survivable
        self.polls = job.failures.survivable or job.raises
        self._calls: Calls | None = None
        self._comparison: Comparison | None = None
        self._told: DistError | None = None
        self._unheard: MismatchError | None = None

    def watch(self, link: Link) -> None:
        self._link = link
        self.job.liveness.register(link)

    def attach(self) -> None:
        """Make the resources by which ranks compare calls, and the ones in memory that ranks share. Collective.

        If the ranks of a node can share no memory, a group has no eager buffers and no FIFOs, and its calls are not
        compared on the node.
        """
        link = self._link
        link.own(self)
        if link.size == 1:
            return
        eager_bytes = eager.region_bytes(link)
        fifo_bytes = fifo.region_bytes(link.size) if eager_bytes else 0
        memory = None
        if link.shares_memory:
            region_bytes = calls.REGION_BYTES + eager_bytes + fifo_bytes
            found: segment.Allocation = drive(segment.allocate(link.node, link, region_bytes))
            memory = found.memory
        self._calls = link.own(Calls(link, bytearray(calls.REGION_BYTES) if memory is None else memory))
        if memory is not None and eager_bytes:
            link.own(EagerBuffers(link, memory, calls.REGION_BYTES * link.size))
            link.own(fifo.Transport(link, memory, (calls.REGION_BYTES + eager_bytes) * link.size))
        if not link.one_node:
            self._comparison = link.own(Comparison(link, self._calls, self.find))

    def find(self, error: DistError) -> None:
        """Let the next call or wait raise ``error``, on all ranks. The watchdog's thread may call this."""
        self.job.liveness.tell(self._link, error)
        self.be_told(error)

    def be_told(self, error: DistError) -> None:
        self._told = error

    def publish(self, sequence: int, call: Record) -> bool:
        """Publish this rank's call. Return True if all ranks are known to make it; a mismatch aborts the group."""
        if self._calls is None:
            return True
        try:
            if self._told is not None:
                raise self._told
            return self._calls.publish(sequence, call) and self._comparison is None
        except DistError as error:
            self.abort(error)
            raise

    def verify(self, sequence: int) -> None:
        """Compare a finished call with those of the node's other ranks; a mismatch aborts the group."""
        if self._calls is not None:
            try:
                self._calls.verify(sequence)
            except MismatchError as error:
                self.abort(error)
                raise

    def verify_failed(self, sequence: int, error: Exception) -> None:
        """Raise the mismatch or the rank's failure that has caused ``error``, if there is one."""
        self.job.failures.translate(error)
        self._link.may_hold_messages |= isinstance(error, MismatchError)
        may_tell_more = isinstance(error, calls.UnknownCallError)
        may_tell_more |= isinstance(error, calls.BlockError) and self._comparison is not None
        if may_tell_more or not isinstance(error, MismatchError):
            self._await_told(error)
        self.verify(sequence)

    def _await_told(self, error: BaseException) -> None:
        """Wait for other ranks to publish their calls or to tell of a mismatch; raise the mismatch if there is one."""
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
        # This catches Exception and not MismatchError. At its end the interpreter closes abandoned generators, and the
        # clause would then look up MismatchError, a global name that may be gone.
        except Exception as error:
            self._unheard = error if isinstance(error, MismatchError) else self._unheard
            raise
        return value

    def unheard(self) -> DistError | None:
        """Return the error of a mismatch that the program may not have seen; None if there is none.

        It is the mismatch that ended an operation for which the program has not waited, or else what `disagreement`
        finds.
        """
        return self._unheard or self.disagreement()

    def disagreement(self) -> DistError | None:
        published, buffers = self._calls, self._link.find(EagerBuffers)
        if self._told is not None:
            return self._told
        try:
            if published is not None:
                published.check()
            if buffers is not None:
                calls.compare_eager(self._link, buffers.calls())
        except MismatchError as error:
            return error
        return None

    def check(self) -> None:
        """Raise if a rank has failed or left, or ranks make different calls."""
        if not self.job.world.thread_multiple:
            self.job.liveness.progress()  # there is no watchdog that does it
        self.job.failures.raise_if_failed()
        error = self.disagreement()
        if error is not None:
            self.abort(error)
            raise error

    def timed_out(self, error: DistTimeoutError) -> None:
        if self.job.raises:
            self.abort(error)

    def explain(self, operation: Operation) -> str:
        unmatched = self.unmatched()
        return self.job.reports.explain(operation) + (f"\n  {unmatched}" if unmatched else "")

    def unmatched(self) -> str:
        mailbox = self._link.find(Mailbox)
        try:
            found = [] if mailbox is None else mailbox.unmatched()
        except (MPI.Exception, DistError):  # an aborted group raises it
            found = []
        if not found:
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
        self.job.failures.translate(error)
        if isinstance(error, MPI.Exception):
            self._await_told(error)

    def abort(self, error: DistError) -> None:
        """End the group with ``error``. Tell the other ranks if they would not find the error themselves."""
        unseen = self.job.raises or (self._comparison is not None and isinstance(error, MismatchError))
        if unseen and error is not self._told:
            self.job.liveness.tell(self._link, error)
        self._link.abort(error)

    def close(self) -> None:
        """Retire the group in `Liveness`, because other ranks may still be in its last operation."""
        self.job.liveness.retire(self._link)
        self._calls = self._comparison = self._told = None

    def drop(self, error: DistError) -> None:
        self.close()


def connect(job: Job, comm: MPI.Intracomm, timeout_s: float) -> Link:
    """Return a group's link, which owns ``comm``, and has a monitor; collective."""
    monitor = GroupMonitor(job)
    link = Link(job.world, comm, timeout_s, monitor)
    try:
        monitor.attach()
    except BaseException:
        link.discard()
        raise
    return link

"""Dispatch: the one path of every collective call, from its plan to its `Work` or result.

Every call begins and ends in the same way. At the beginning it gets a number, is recorded, and is published to the
other ranks. At the end it is compared with their calls, if it was not at the beginning, and its end is recorded.
`begin` is the beginning alone. `calling` does all of it for a blocking call, and shows the wait between to the
watchdog; `submit` does it for a queued call. Only `OneShot.run` and messages do this by code of their own, for speed.
"""

import copy
from collections.abc import Callable, Sequence
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any

from mpiddp.algorithms.plan import Plan
from mpiddp.device import device_arrays_of, stream
from mpiddp.errors import DistError
from mpiddp.mpi import recorder, requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import spans_of
from mpiddp.mpi.operation import Call, Operation, waiting
from mpiddp.mpi.p2p import Route
from mpiddp.mpi.requests import IN_TURN, Steps, awaiting, drive
from mpiddp.mpi.work import Work, abandon
from mpiddp.shm.cma import UnreachableError
from mpiddp.typing import Array

from . import debug
from .groups import ProcessGroup


def begin(group: ProcessGroup, call: Call, depth: int = 3) -> tuple[Operation, bool]:
    """Begin a call: number, record and publish it; return it, and False if it has to be compared at its end.

    A call without a `Record` is never compared. It is not published, and is numbered among this rank's messages.
    ``depth`` goes to `recorder.begin`.
    """
    link, record = group._link, call.record
    if record is None:
        link.message_count = number = link.message_count + 1
    else:
        link.sequence = number = link.sequence + 1
    operation = recorder.begin(call, number, depth)
    if debug.on:
        debug.log(operation)
    return operation, record is None or group._monitor.publish(number, record)


def begin_message(route: Route, depth: int = 3) -> list[Any]:
    """Record a message with its number; return the entry. The caller sets its last item, the time of the end."""
    link, frame = route.mailbox.link, recorder.caller(depth)
    link.message_count = number = link.message_count + 1
    entry: list[Any] = [route.call, number, frame.f_code, frame.f_lasti, monotonic(), 0.0]
    recorder.append(entry)
    if debug.on:
        debug.log(Operation(*entry))
    return entry


class calling(awaiting):  # noqa: N801 - a statement's context
    """The beginning and the end of a call, and this thread's wait between them (see the module)."""

    __slots__ = ("_confirmed", "_monitor")

    def __init__(self, group: ProcessGroup, call: Call) -> None:
        self._monitor = group._monitor
        self._operation, self._confirmed = begin(group, call, 4)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        operation = self._operation
        if error is None and self._confirmed and self._outer is None:
            del waiting[self._thread]
            operation.end = monotonic()
            return
        try:
            if isinstance(error, Exception) and operation.call.record is not None:
                self._monitor.verify_failed(operation.number, error)
        finally:
            super().__exit__(None, None, None)
        if error is None:
            if not self._confirmed:
                self._monitor.verify(operation.number)
            operation.end = monotonic()


def dispatch(
    group: ProcessGroup,
    plan: Plan,
    args: tuple[Any, ...],
    outputs: Sequence[Array],
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Run the plan's steps at once, or submit them to the queue.

    The queue is needed if anything is pending, for a time limit, and for an asynchronous call without `Plan.run`.
    """
    link = group._link
    if link.busy or requests.only_thread:
        expect_own_thread(link.busy, group)
    if requests.pending or timeout_s is not None or (async_op and (plan.run is None or debug.on)):
        work = submit(group, plan, args, outputs, timeout_s)
        if async_op:
            return work
        work.wait()
        return None
    if plan.run is None or debug.on:
        perform(group, plan, args, outputs)
        return None
    link.busy = True
    try:
        return plan.run(args, outputs if async_op else None)
    finally:
        link.busy = False


def expect_own_thread(busy: bool, group: ProcessGroup) -> None:
    """Raise `DistError` if another thread is in a collective of the group, or MPI takes no second thread."""
    if busy:
        raise DistError(
            f"{group._link} is used by two threads at once, whose calls have no order that all ranks share; make a"
            " group for each thread with new_group"
        )
    if requests.only_thread and requests.only_thread != get_ident():
        raise DistError(
            "MPI runs without MPI_THREAD_MULTIPLE here, so only the thread that called init_process_group may"
            " communicate; ask for it before MPI starts (mpi4py.rc.thread_level = 'multiple', its default)"
        )


def perform(group: ProcessGroup, plan: Plan, args: tuple[Any, ...], outputs: Sequence[Array] = ()) -> Any:
    """Make a call, wait for its end, and return the value of its steps.

    It blocks in MPI, unless operations are pending or the group's monitor needs polls.
    """
    link = group._link
    if requests.pending or group._monitor.polls:
        work = submit(group, plan, args, outputs)
        work.wait()
        return work._value
    with calling(group, plan.call) as operation:
        link.busy = True
        try:
            steps = plan.steps(link, operation.call, *args)
            return drive(steps)
        except (MPI.Exception, UnreachableError) as error:  # MPI and other ranks may still write to the arrays
            abandon(steps, error)
            raise
        finally:
            link.busy = False


def submit(
    group: ProcessGroup,
    plan: Plan,
    args: tuple[Any, ...],
    outputs: Sequence[Array],
    timeout_s: float | None = None,
) -> Work:
    """Queue a call; ``timeout_s`` is the limit of its `wait`, by default that of the group."""
    link = group._link
    with requests.lock:
        operation, confirmed = begin(group, plan.call)
        spans = sorted(spans_of(args))
        if link.queue.delays(spans):
            marks = [(x, stream.ready(x)) for x in device_arrays_of(args)]
            steps = _in_turn(marks, plan.steps, copy.copy(link), plan.call, *args)
        else:
            steps = plan.steps(link, plan.call, *args)
        if not confirmed:
            steps = group._monitor.verifying(operation.number, steps)
        work = link.queue.submit(steps, operation, outputs, spans)
    work._limit_s = timeout_s
    return work


def _in_turn(marks: Sequence[tuple[Array, stream.Mark]], steps: Callable[..., Steps], link: Link, *args: Any) -> Steps:
    """Begin when the call's turn has come, after the work that was queued on its devices when it was submitted.

    ``link`` is a copy, whose `sequence` is still the call's number.
    """
    yield IN_TURN
    for x, mark in marks:
        stream.hold(x, mark)
    return (yield from steps(link, *args))


def root_rank(group: ProcessGroup, global_rank: int | None, group_rank: int | None, default: int | None = None) -> int:
    """Return the group rank of ``src`` or ``group_src``.

    ValueError if both are given, or neither without a ``default``, or a rank that is no member.
    """
    if type(global_rank) is int and group_rank is None:
        found = group._group_rank_of.get(global_rank)
        if found is not None:
            return found
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return group._checked(group_rank)
    if global_rank is None:
        if default is None:
            raise ValueError("Must specify global_rank or group_rank")
        global_rank = default
    return group._group_rank(global_rank)


def expect_on_root(given: Sequence[Any] | None, group: ProcessGroup, root: int, name: str, role: str) -> None:
    """Raise ValueError unless the root, and no other rank, has given a list."""
    on_root = group._link.rank == root
    if on_root and not given:
        raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
    if given and not on_root:
        raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")

"""Dispatch: the one path of every collective call, from its plan to its `Work` or result."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

from mpiddp.algorithms.plan import Plan
from mpiddp.errors import DistError
from mpiddp.mpi import recorder, requests
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Operation, new_operation
from mpiddp.mpi.recorder import Signature
from mpiddp.mpi.work import Work
from mpiddp.typing import Array

from . import debug
from .groups import ProcessGroup


def keep(group: ProcessGroup, key: tuple[Any, ...], plan: Plan) -> Plan:
    return group.plans.remember(key, debug.traced(plan))


def dispatch(
    group: ProcessGroup,
    plan: Plan,
    args: tuple[Any, ...],
    outputs: Sequence[Array],
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Run the plan's steps at once if nothing is pending, else by the queue."""
    link = group.link
    if link.busy or requests.only_thread:
        expect_own_thread(link.busy, group)
    if async_op or requests.pending or timeout_s is not None or plan.trace is not None:
        return submit(group, plan, args, outputs, async_op, timeout_s)
    if plan.run is None:
        perform(group, plan, args, outputs)
        return None
    link.busy = True
    try:
        plan.run(plan.label, args)
    finally:
        link.busy = False
    return None


def expect_own_thread(busy: bool, group: ProcessGroup) -> None:
    """Raise `DistError` if another thread is in a collective of the group, or MPI takes no second thread."""
    if busy:
        raise DistError(
            f"{group.link} is used by two threads at once, whose calls have no order that all ranks share; make a group"
            " for each thread with new_group"
        )
    if requests.only_thread and requests.only_thread != get_ident():
        raise DistError(
            "MPI runs without MPI_THREAD_MULTIPLE here, so only the thread that called init_process_group may"
            " communicate; ask for it before MPI starts (mpi4py.rc.thread_level = 'multiple', its default)"
        )


def perform(group: ProcessGroup, plan: Plan, args: tuple[Any, ...], outputs: Sequence[Array] = ()) -> Any:
    """Return the value of the steps; block in MPI where nothing is pending."""
    link, monitor, plan = group.link, group.monitor, debug.traced(plan)
    if requests.pending or monitor.survivable or plan.trace is not None:
        work = submit(group, plan, args, outputs, True, None)
        assert work is not None
        work.wait()
        return work._value
    link.sequence = sequence = link.sequence + 1
    entry = recorder.begin(plan.signature or _signature(link, plan, args, outputs), sequence)
    operation = new_operation(
        Operation, (plan.label, link.members, outputs[0] if outputs else None, None, False, sequence, None)
    )
    confirmed = monitor.publish(sequence, plan.call)
    link.busy = True
    began = requests.begin_wait(operation)
    try:
        value = requests.drive(plan.steps(link, *args))
    except Exception as error:
        monitor.verify_failed(sequence, error)
        raise
    finally:
        requests.end_wait(*began)
        link.busy = False
    if not confirmed:
        monitor.verify(sequence)
    recorder.end(entry)
    return value


def _signature(link: Link, plan: Plan, args: tuple[Any, ...], outputs: Sequence[Array]) -> Signature:
    """Return the signature of a call without a kept plan; several arrays count as one."""
    given = [x for each in args for x in (each if isinstance(each, list) else (each,)) if hasattr(x, "nbytes")]
    written = set(map(id, outputs))
    inputs = [x for x in given if id(x) not in written] or given
    dtype = inputs[0].dtype if inputs else None
    return Signature(link.id, plan.label, plan.call, dtype, _shape(inputs), _shape(outputs))


def _shape(arrays: Sequence[Array]) -> tuple[int, ...] | None:
    if len(arrays) == 1:
        return arrays[0].shape
    return (sum(x.size for x in arrays),) if arrays else None


def submit(
    group: ProcessGroup,
    plan: Plan,
    args: tuple[Any, ...],
    outputs: Sequence[Array],
    async_op: bool,
    timeout_s: float | None,
) -> Work | None:
    """Queue a call; without ``async_op`` wait for it."""
    link, monitor = group.link, group.monitor
    with requests.lock:
        link.sequence = sequence = link.sequence + 1
        entry = recorder.begin(plan.signature or _signature(link, plan, args, outputs), sequence)
        operation = new_operation(
            Operation, (plan.label, link.members, outputs[0] if outputs else None, None, False, sequence, None)
        )
        confirmed = monitor.publish(sequence, plan.call)
        check = None
        if plan.trace is None:
            steps = plan.steps(link, *args)
        else:
            steps, check = plan.trace(operation, link, plan, args, outputs)
        work = link.queue.submit(steps if confirmed else monitor.verifying(sequence, steps), operation, outputs)
        work._record(entry)
    if check is not None:
        work._run_check(check)
    work._set_timeout(timeout_s)
    if async_op:
        return work
    work.wait()
    return None


def root_rank(group: ProcessGroup, global_rank: int | None, group_rank: int | None, default: int | None = None) -> int:
    """Return the group rank of ``src`` or ``group_src``; ValueError for both, neither, or no member."""
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return group.checked(group_rank)
    if global_rank is None:
        if default is None:
            raise ValueError("Must specify global_rank or group_rank")
        global_rank = default
    return group.group_rank(global_rank)


def expect_on_root(given: Sequence[Any] | None, group: ProcessGroup, root: int, name: str, role: str) -> None:
    """Raise ValueError unless the root, and no other rank, has given a list."""
    if group.rank() == root and not given:
        raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
    if group.rank() != root and given:
        raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")

"""What the collectives have in common: how their steps are run, or submitted.

Every call says by what number the ranks know it, so that ranks of a node that call different things find out, and goes
one of three ways: at once, where an algorithm can and nothing is on its way; by driving its steps; or, asynchronous or
limited in time, through the group's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms import one_shot, plan
from mpiddp.algorithms.one_shot import Job, OneShot
from mpiddp.faults import calls
from mpiddp.faults.calls import ANY_COUNT, NO_ROOT
from mpiddp.mpi import operation, work
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import dtype_code, dtype_layout
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import debug
from .groups import ProcessGroup

_new_tuple = tuple.__new__


def perform(
    name: str,
    group: ProcessGroup,
    async_op: bool,
    outputs: Sequence[Array],
    algorithm: Callable[..., Steps],
    *args: Any,
    like: Array | None = None,
    count: int = ANY_COUNT,
    op: ReduceOp | None = None,
    root: int = NO_ROOT,
    layout: str = "",
    timeout_s: float | None = None,
) -> Any:
    """Run an algorithm on a group, or submit it; return its Work, or what its steps return.

    Parameters
    ----------
    like : array, optional
        One with the dtype that all ranks must give.
    count : int, optional
        The number of elements that all ranks must give.
    op, root : optional
        The reduction and the group rank of the root, which must be equal on all ranks.
    layout : str, optional
        Whatever else must be.
    timeout_s : float, optional
        How long it may take, in seconds; the group's timeout by default.

    Raises
    ------
    MismatchError
        If ranks of the node call something else.
    """
    link = group.link
    blocking = not async_op and not work.unfinished and timeout_s is None
    if blocking and type(algorithm) is OneShot and not debug.on:
        jobs = algorithm.jobs(link, *args)
        if not one_shot.at_once(link, (name, outputs[0] if outputs else None, op, count, root), jobs):
            link.note(_kind(name, algorithm, like, op, layout), count, root)
        if like is not None and len(jobs) == 1:
            _remember(name, link, jobs[0], _kind(name, algorithm, like, op, layout), count, op, root)
        return None
    kind = _kind(name, algorithm, like, op, layout)
    observed = debug.Observed(name, algorithm, outputs, kind, count, root) if debug.detail else None
    same = link.begin(kind if observed is None else kind | calls.AGREES, count, root)
    # Half the time of Operation(...), which is more than the rest of this function takes.
    what = _new_tuple(Operation, (name, link, outputs[0] if outputs else None, None, False, link.sequence))
    if debug.on:
        debug.log(what)
    elif blocking and not link.world.deaths.survivable:
        outer, operation.running = operation.running, what
        try:
            value = work.drive(algorithm(link, *args))
        except Exception:
            link.confirm(what.number)  # why it went wrong is the better error
            raise
        finally:
            operation.running = outer
        if not same:
            link.confirm(what.number)
        return value
    steps = (observed or algorithm)(link, *args)
    submitted = link.queue.submit(steps if same else link.confirming(steps), what, list(outputs))
    if observed is not None and observed.watched is not None:
        submitted.verify(observed.watched.check)
    submitted.limit(timeout_s)
    if async_op:
        return submitted
    submitted.wait()
    return submitted.value


def again(
    name: str,
    group: ProcessGroup,
    async_op: bool,
    output: Array,
    x: Array,
    op: ReduceOp | None = None,
    root: int = NO_ROOT,
) -> bool:
    """Make a call at once, if `perform` has made one just like it at once before, and tell whether it has.

    What was checked and chosen then holds for all arrays of these dtypes and shapes: it is not looked at anew.

    Parameters
    ----------
    output, x : array
        Where the result goes, and what this rank gives; each has passed `as_array`.
    """
    link = group.link
    if link.slots is None or async_op or work.unfinished or debug.on or group.coalescing is not None:
        return False
    if not type(x) is type(output) is np.ndarray:
        return False
    known = link.slots.known.get((plan.epoch, name, x.dtype, x.shape, output.dtype, output.shape, op, root))
    if known is None:
        return False
    shot, kind, count = known
    if not one_shot.at_once(link, (name, output, op, count, root), ((shot, x, output),)):
        link.note(kind, count, root)
    return True


def _remember(name: str, link: Link, job: Job, kind: int, count: int, op: ReduceOp | None, root: int) -> None:
    """Have calls just like this one made `again`."""
    shot, x, output = job
    if link.slots is not None:
        key = plan.epoch, name, x.dtype, x.shape, output.dtype, output.shape, op, root
        link.slots.remember(key, (shot, kind, count))


_Key = tuple[str, Callable[..., Steps], np.dtype[Any] | None, ReduceOp | None, str]
_kinds: dict[_Key, int] = {}
_MOST_KINDS = 4096


def _kind(name: str, algorithm: Callable[..., Steps], like: Array | None, op: ReduceOp | None, layout: str) -> int:
    """Return by what number the ranks know such calls."""
    key = (name, algorithm, None if like is None else like.dtype, op, layout)
    return _kinds.get(key) or _make_kind(key)


def _make_kind(key: _Key) -> int:
    """Find it out, and remember it."""
    name, algorithm, dtype, op, layout = key
    number = _kinds[key] = calls.kind(
        name,
        calls.NO_DTYPE if dtype is None else dtype_code(dtype) | calls.ON_DEVICE * plan.is_for_devices(algorithm),
        calls.NO_REDUCTION if op is None else op.value,
        layout if dtype is None else layout + dtype_layout(dtype),
        calls.compares(algorithm),
    )
    if len(_kinds) > _MOST_KINDS:  # layouts come and go
        _kinds.clear()
    return number


def root_rank(group: ProcessGroup, global_rank: int | None, group_rank: int | None, default: int | None = None) -> int:
    """Return the group rank that ``src`` and ``group_src``, or ``dst`` and ``group_dst``, name.

    Raises
    ------
    ValueError
        If both or neither are given, or the group has no such rank.
    """
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return group.checked(group_rank)
    if global_rank is None:
        if default is None:
            raise ValueError("Must specify global_rank or group_rank")
        global_rank = default
    return group.group_rank(global_rank)

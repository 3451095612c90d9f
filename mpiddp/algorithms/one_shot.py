"""Short arrays in the memory of a node: every rank shows its own, and works on everybody's for itself.

No message, and one wait: that for the others to come. So it costs a few loads and stores beside the calls of NumPy, for
which MPI's collectives have to be fast; with many ranks, or long arrays, everybody reads too much. Rows are folded in
rank order: the same bits on every rank and in every run. Arrays longer than a slot go in pieces.

References
----------
The one shot is that of the all-reduce in PyTorch's symmetric memory and NVIDIA's TensorRT-LLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiddp.faults import calls
from mpiddp.faults.calls import NO_ROOT
from mpiddp.mpi.link import NO_CALL, READY, AtOnce, Link
from mpiddp.mpi.message import as_bytes, dtype_code, dtype_layout
from mpiddp.mpi.reduction import ReduceOp, combining, finish, is_half, premultiply
from mpiddp.mpi.work import Steps
from mpiddp.shm.eager import SLOT_BYTES, Slots, Turn, Until, packed
from mpiddp.typing import Array

from .local_reduce import fold_rows


class _Role(NamedTuple):
    """What a rank does in an operation."""

    shows: bool
    """Whether it has something to show."""
    awaited: Until | None
    """For whom it waits."""
    end: Callable[[Turn, Array], None] | None
    """What makes the result then, in the array given."""


class Shot(NamedTuple):
    """What is done in a turn for one operation, on arrays of one shape and dtype: made once, used in many turns."""

    turns: list[Turn]
    call: bytes
    change: Callable[[Array], None] | None
    """What is done with the copy that a rank shows, before it does."""
    role: _Role


Job: TypeAlias = tuple[Shot, Array, Array]
"""A shot, the array that is shown, and the one that the result goes to."""


class OneShot:
    """An operation, by the same shots in steps and at once.

    Parameters
    ----------
    jobs : callable
        Returns the jobs of a call: one, or more where the arrays are longer than a slot.
    """

    def __init__(self, jobs: Callable[..., Sequence[Job]]) -> None:
        self.jobs = jobs
        functools.update_wrapper(self, jobs)  # its name, parameters and docstring

    def __call__(self, link: Link, *args: Any) -> Steps:
        """Return the steps, which do everything at the head of the queue: when it is submitted, if that is empty."""
        slots = _slots_of(link)
        # A later step of another operation runs when this rank may have begun others already.
        number = 0 if link.now is link.later else link.sequence
        if len(link.queue):
            yield READY
        for (turns, call, change, (shows, awaited, end)), x, result in self.jobs(link, *args):
            if not slots.free.Test():
                yield slots.free
            turn = slots.begin(turns, number, call, x if shows else None, change)
            if awaited is not None:
                yield awaited
            if end is not None:
                end(turn, result)


def at_once(link: Link, call: AtOnce, jobs: Sequence[Job]) -> bool:
    """Make a call without steps, while nothing of this process is on its way: a short array has no time for them.

    Returns
    -------
    bool
        Whether this rank had to wait for others in it; of a call in which it had not, they may never hear.
    """
    slots, number, awaited = link.slots, link.count(), None
    assert slots is not None, "chosen where there are some"
    link.call = call
    try:
        for (turns, shown, change, (shows, awaited, end)), x, result in jobs:
            turn = slots.begin(turns, number, shown, x if shows else None, change)
            if awaited is not None:
                awaited.Wait()
            if end is not None:
                end(turn, result)
    except BaseException as error:
        link.rest()
        if isinstance(error, Exception):
            link.world.deaths.meet(error)
        raise
    link.call = NO_CALL
    if link.lingers:
        link.rest()
        link.confirm(number)
        return True
    return awaited is not None


def _slots_of(link: Link) -> Slots:
    assert link.slots is not None, "chosen where there are some"
    return link.slots


_Key: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], "np.dtype[Any]", int, ReduceOp | None, int]


def _job(
    link: Link, operation: str, x: Array, result: Array, count: int, op: ReduceOp | None = None, root: int = NO_ROOT
) -> Job:
    """Return the job of an operation of ``count`` elements on arrays, or on pieces of some."""
    key = operation, x.shape, result.shape, x.dtype, count, op, root
    return _slots_of(link).known.get(key) or _make_shot(link, key), x, result


def _make_shot(link: Link, key: _Key) -> Shot:
    """Find out what is done in a turn, and remember it."""
    slots = _slots_of(link)
    operation, shape, result_shape, dtype, count, op, root = key
    kind = calls.kind(operation, dtype_code(dtype), calls.NO_REDUCTION if op is None else op.value, dtype_layout(dtype))
    change = None if op is None or op.factor is None else functools.partial(premultiply, op)
    role = _ROLES[operation](link, slots, dtype, op, root)
    turns = slots.turns(shape, dtype)
    if operation == "reduce_scatter":  # of every row, its own block is all that a rank reads
        blocks, mine = (link.size, *result_shape), (link.rank, ...)
        turns = [turn._replace(rows=[row.reshape(blocks)[mine] for row in turn.rows]) for turn in turns]
    made = Shot(turns, packed(kind, count, root), change, role)
    slots.remember(key, made)
    return made


def _folding(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Turn, Array], None]:
    """Return what folds the rows of a turn, which have been multiplied by their factors, in their order."""
    combine, averages = getattr(np, combining(op)), op is ReduceOp.AVG

    def fold(turn: Turn, out: Array) -> None:
        rows = turn.rows
        combine(rows[0], rows[1], out=out)
        for row in rows[2:]:
            combine(out, row, out=out)
        if averages:
            finish(op, out, len(rows))

    def fold_wide(turn: Turn, out: Array) -> None:
        fold_rows(op, [row.reshape(-1) for row in turn.rows], (out.reshape(-1),), len(turn.rows))

    return fold_wide if is_half(dtype) else fold


def _meeting(link: Link, slots: Slots, *_: object) -> _Role:
    return _Role(False, slots.everybody, None)


def _broadcasting(link: Link, slots: Slots, dtype: object, op: object, root: int) -> _Role:
    def take(turn: Turn, out: Array) -> None:
        out[...] = turn.rows[root]

    return _Role(True, None, None) if link.rank == root else _Role(False, slots.came(root), take)


def _reducing(link: Link, slots: Slots, dtype: np.dtype[Any], op: ReduceOp, root: int) -> _Role:
    if root not in (NO_ROOT, link.rank):
        return _Role(True, None, None)
    return _Role(True, slots.everybody, _folding(op, dtype))


def _gathering(link: Link, slots: Slots, *_: object) -> _Role:
    def take(turn: Turn, out: Array) -> None:
        out.reshape(turn.table.shape)[...] = turn.table

    return _Role(True, slots.everybody, take)


_ROLES: dict[str, Callable[..., _Role]] = {
    "barrier": _meeting,
    "broadcast": _broadcasting,
    "all_reduce": _reducing,
    "reduce": _reducing,
    "reduce_scatter": _reducing,
    "all_gather": _gathering,
}


def _spans(count: int, itemsize: int) -> Iterator[slice]:
    """Return where pieces of ``count`` elements begin and end that fit into a slot: of none, too, there is one."""
    step = SLOT_BYTES // itemsize
    return (slice(start, min(start + step, count)) for start in range(0, max(count, 1), step))


def _cut(x: Array) -> Array:
    """Return ``x`` as what pieces are made of: flat, and in bytes where a slot has no place for an element."""
    return x.reshape(-1) if x.itemsize <= SLOT_BYTES else as_bytes(x)


def _in_place(operation: str, link: Link, x: Array, op: ReduceOp | None = None, root: int = NO_ROOT) -> Sequence[Job]:
    """Return the jobs of an operation whose result goes where its input was."""
    if x.nbytes <= SLOT_BYTES:
        return (_job(link, operation, x, x, x.size, op, root),)
    flat = _cut(x)
    pieces = [flat[span] for span in _spans(flat.size, flat.itemsize)]
    return [_job(link, operation, piece, piece, flat.size, op, root) for piece in pieces]


def _apart(x: Array, output: Array) -> Array:
    """Return ``x``, or a copy where pieces of it would be overwritten before they are shown."""
    return x.copy() if x.nbytes > SLOT_BYTES and np.may_share_memory(x, output) else x


_NOTHING = np.empty(0, np.uint8)


@OneShot
def barrier(link: Link) -> Sequence[Job]:
    """Wait until every rank has come."""
    return (_job(link, "barrier", _NOTHING, _NOTHING, calls.ANY_COUNT),)


@OneShot
def broadcast(link: Link, x: Array, root: int) -> Sequence[Job]:
    """Copy root's ``x`` to all ranks; root does not wait for them."""
    return _in_place("broadcast", link, x, None, root)


@OneShot
def all_reduce(link: Link, x: Array, op: ReduceOp) -> Sequence[Job]:
    """Reduce ``x`` over all ranks, in place."""
    return _in_place("all_reduce", link, x, op)


@OneShot
def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Sequence[Job]:
    """Reduce ``x`` over all ranks into root's ``x``; the other ranks' ``x`` stays as it is, and they do not wait."""
    return _in_place("reduce", link, x, op, root)


@OneShot
def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Sequence[Job]:
    """Reduce ``x``, of ``link.size`` equal blocks, over all ranks and leave block r in rank r's ``output``."""
    if x.nbytes <= SLOT_BYTES:
        return (_job(link, "reduce_scatter", x, output, output.size, op),)
    result, blocks = output.reshape(-1), _apart(x, output).reshape(link.size, output.size)
    spans = _spans(result.size, x.itemsize * link.size)
    return [_job(link, "reduce_scatter", blocks[:, span], result[span], result.size, op) for span in spans]


@OneShot
def all_gather(link: Link, output: Array, x: Array) -> Sequence[Job]:
    """Copy every rank's ``x`` to all ranks, one after the other into ``output``."""
    if x.nbytes <= SLOT_BYTES:
        return (_job(link, "all_gather", x, output, x.size),)
    source, blocks = _cut(_apart(x, output)), _cut(output).reshape(link.size, -1)
    spans = _spans(source.size, source.itemsize)
    return [_job(link, "all_gather", source[span], blocks[:, span], source.size) for span in spans]


__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter"]

"""Collectives on arrays: each checks its arguments, finds the plan of the call, and dispatches it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.errors import ArrayError
from mpiddp.faults.calls import ANY_COUNT, NO_ROOT
from mpiddp.mpi.message import as_array, as_arrays, expect_apart, expect_like
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import seconds
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import dispatch, expect_on_root, root_rank
from .groups import GroupLike, ProcessGroup, member

# Errors name both of torch's names.
_GATHER = "all_gather_single (all_gather_into_tensor)"
_SCATTER = "reduce_scatter_single (reduce_scatter_tensor)"
_BARRIER = ("barrier", None)


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Return when every rank of the group has called it; the timeout's error names the missing ranks."""
    found = member(group, "barrier")
    if found is None:
        return None
    plan = found.plans.get(_BARRIER) or found.plans.remember(_BARRIER, planning.barrier(found.link))
    return dispatch(found, plan, (None,), (), async_op, seconds(timeout))


def broadcast(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copy ``tensor`` of rank ``src``, of equal shape and dtype on all ranks, into that of all others."""
    found = member(group, "broadcast")
    if found is None:
        return None
    root = root_rank(found, src, group_src)
    x = as_array(tensor, "broadcast", writable=found.link.rank != root)
    key = ("broadcast", algorithm, root, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or found.plans.remember(key, planning.make(found.link, *key[:2], x, x, root=root))
    return dispatch(found, plan, (x, root), (x,), async_op)


def all_reduce(
    tensor: ArrayLike,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce ``tensor``, of equal shape and dtype on all ranks, in place, to the same bits on every rank.

    Examples
    --------
    >>> dist.all_reduce(gradient, op=dist.ReduceOp.AVG)  # doctest: +SKIP
    """
    found = member(group, "all_reduce")
    if found is None:
        return None
    x = as_array(tensor, "all_reduce")
    key = ("all_reduce", algorithm, op, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or found.plans.remember(key, planning.make(found.link, *key[:2], x, x, op))
    return dispatch(found, plan, (x, op), (x,), async_op)


def all_reduce_bucket(x: Array, op: ReduceOp, group: ProcessGroup, index: int) -> Work:
    """Begin the all-reduce of a bucket, which errors and logs name."""
    member(group, "all_reduce")
    key = ("all_reduce", None, op, x.dtype, x.shape, type(x), index)
    plan = group.plans.get(key) or group.plans.remember(
        key, planning.make(group.link, *key[:2], x, x, op, bucket=index)
    )
    work = dispatch(group, plan, (x, op), (x,), async_op=True)
    assert work is not None
    return work


def reduce(
    tensor: ArrayLike,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce ``tensor``, of equal shape and dtype on all ranks, into that of rank ``dst``.

    Others' are unchanged; torch's Gloo and NCCL leave partial sums.
    """
    found = member(group, "reduce")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst)
    x = as_array(tensor, "reduce", writable=found.link.rank == root)
    key = ("reduce", algorithm, op, root, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or found.plans.remember(key, planning.make(found.link, *key[:2], x, x, op, root))
    return dispatch(found, plan, (x, root, op), (x,), async_op)


def _expect_blocks(whole: Array, part: Array, size: int, operation: str, whole_name: str, part_name: str) -> None:
    expect_like(whole, None, part.dtype, operation, whole_name)
    stacked = (size, *part.shape)
    joined = (size * part.shape[0], *part.shape[1:]) if part.ndim else (size,)
    if whole.shape not in (stacked, joined):
        raise ArrayError(
            f"{operation} needs shape {joined} (concatenated) or {stacked} (stacked) as `{whole_name}` for {size} ranks"
            f" with `{part_name}` of shape {part.shape}, got {whole.shape}"
        )


def all_gather_single(
    output_tensor: ArrayLike,
    input_tensor: ArrayLike,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copy every rank's array, in rank order, into one array on all ranks.

    Parameters
    ----------
    output_tensor : array
        Shape ``(size * n, ...)`` or ``(size, n, ...)``.
    input_tensor : array
        Shape ``(n, ...)``, equal on all ranks.
    """
    found = member(group, "all_gather_single")
    if found is None:
        return None
    x = as_array(input_tensor, _GATHER, writable=False, name="input_tensor")
    output = as_array(output_tensor, _GATHER, name="output_tensor")
    key = ("all_gather_single", algorithm, x.dtype, x.shape, output.dtype, output.shape, type(x), type(output))
    plan = found.plans.get(key)
    if plan is None:
        _expect_blocks(output, x, found.link.size, _GATHER, "output_tensor", "input_tensor")
        plan = found.plans.remember(key, planning.make(found.link, *key[:2], output, x, places=(0, 1)))
    return dispatch(found, plan, (output, x), (output,), async_op)


all_gather_into_tensor = all_gather_single


def reduce_scatter_single(
    output: ArrayLike,
    input: ArrayLike,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce arrays of ``size`` blocks, block r into rank r's output.

    Parameters
    ----------
    output : array
        Shape ``(n, ...)``, equal on all ranks.
    input : array
        Shape ``(size * n, ...)`` or ``(size, n, ...)``.
    """
    found = member(group, "reduce_scatter_single")
    if found is None:
        return None
    result = as_array(output, _SCATTER, name="output")
    x = as_array(input, _SCATTER, writable=False, name="input")
    key = ("reduce_scatter_single", algorithm, op, x.dtype, x.shape, result.dtype, result.shape, type(x), type(result))
    plan = found.plans.get(key)
    if plan is None:
        _expect_blocks(x, result, found.link.size, _SCATTER, "input", "output")
        plan = found.plans.remember(key, planning.make(found.link, *key[:2], result, x, op, places=(0, 1)))
    return dispatch(found, plan, (result, x, op), (result,), async_op)


reduce_scatter_tensor = reduce_scatter_single


def reduce_scatter(
    output: ArrayLike,
    input_list: Sequence[ArrayLike],
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce array r of ``input_list`` over all ranks into rank r's ``output``; all have one shape and dtype."""
    found = member(group, "reduce_scatter")
    if found is None:
        return None
    result = as_array(output, "reduce_scatter", name="output")
    inputs = as_arrays(input_list, "reduce_scatter", found.link.size, writable=False, name="input_list")
    for index, given in enumerate(inputs):
        expect_like(given, result.shape, result.dtype, "reduce_scatter", f"input_list[{index}]")
    joined = np.concatenate([given.reshape(-1) for given in inputs])
    key = ("reduce_scatter", algorithm, op, joined.dtype, joined.shape, result.shape, type(joined), type(result))
    plan = found.plans.get(key)
    if plan is None:
        made = planning.make(found.link, *key[:2], result, joined, op, places=(0, 1), count=result.size)
        plan = found.plans.remember(key, made)
    return dispatch(found, plan, (result, joined, op), (result,), async_op)


def _move(
    name: str,
    group: ProcessGroup,
    async_op: bool,
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    args: tuple[Any, ...],
    *,
    count: int = ANY_COUNT,
    root: int = NO_ROOT,
    layout: str = "",
) -> Work | None:
    """Dispatch an operation that only moves data."""
    if len(outputs) > 1:
        expect_apart(outputs, name)
    plan = planning.moving(group.link, name, outputs, inputs, count=count, root=root, layout=layout)
    return dispatch(group, plan, args, outputs, async_op)


def all_gather(
    tensor_list: Sequence[ArrayLike], tensor: ArrayLike, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Copy every rank's ``tensor`` to all ranks, rank r's into array r of ``tensor_list``.

    Shapes may differ between ranks, in torch on NCCL only.
    """
    found = member(group, "all_gather")
    if found is None:
        return None
    x = as_array(tensor, "all_gather", writable=False)
    outputs = as_arrays(tensor_list, "all_gather", found.link.size)
    _expect_list_like(outputs, x, found, "all_gather", "tensor_list")
    sizes = [output.size for output in outputs]
    layout = "" if min(sizes) == max(sizes) else repr(sizes)
    return _move("all_gather", found, async_op, outputs, (x,), (outputs, x), count=sum(sizes), layout=layout)


def _expect_list_like(arrays: Sequence[Array], x: Array, group: ProcessGroup, operation: str, name: str) -> None:
    for index, each in enumerate(arrays):
        shape = x.shape if index == group.link.rank else None
        expect_like(each, shape, x.dtype, operation, f"{name}[{index}]")


def gather(
    tensor: ArrayLike,
    gather_list: Sequence[ArrayLike] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy every rank's ``tensor``, of any shape, to rank ``dst``, rank r's into array r of its ``gather_list``."""
    found = member(group, "gather")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst, default=0)
    x = as_array(tensor, "gather", writable=False)
    expect_on_root(gather_list, found, root, "gather_list", "destination")
    outputs = as_arrays(gather_list, "gather", found.link.size, name="gather_list") if gather_list else None
    _expect_list_like(outputs or (), x, found, "gather", "gather_list")
    return _move("gather", found, async_op, outputs or (), (x,), (outputs, x, root), root=root)


def scatter(
    tensor: ArrayLike,
    scatter_list: Sequence[ArrayLike] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy array r of rank ``src``'s ``scatter_list``, of any shape, into rank r's ``tensor``."""
    found = member(group, "scatter")
    if found is None:
        return None
    root = root_rank(found, src, group_src, default=0)
    x = as_array(tensor, "scatter")
    expect_on_root(scatter_list, found, root, "scatter_list", "source")
    inputs = None
    if scatter_list:
        inputs = as_arrays(scatter_list, "scatter", found.link.size, writable=False, name="scatter_list")
    _expect_list_like(inputs or (), x, found, "scatter", "scatter_list")
    return _move("scatter", found, async_op, (x,), inputs or (), (x, inputs, root), root=root)


def all_to_all(
    output_tensor_list: Sequence[ArrayLike],
    input_tensor_list: Sequence[ArrayLike],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Copy rank r's ``input_tensor_list[s]`` into rank s's ``output_tensor_list[r]``.

    ``output_tensor_list`` and ``input_tensor_list`` have one array for each rank, of one dtype and any shapes.
    """
    found = member(group, "all_to_all")
    if found is None:
        return None
    outputs = as_arrays(output_tensor_list, "all_to_all", found.link.size, name="output_tensor_list")
    inputs = as_arrays(input_tensor_list, "all_to_all", found.link.size, writable=False, name="input_tensor_list")
    for arrays, name in ((outputs, "output_tensor_list"), (inputs, "input_tensor_list")):
        for index, x in enumerate(arrays):
            expect_like(x, None, outputs[0].dtype, "all_to_all", f"{name}[{index}]")
    mine = found.link.rank
    expect_like(outputs[mine], inputs[mine].shape, inputs[mine].dtype, "all_to_all", f"output_tensor_list[{mine}]")
    return _move("all_to_all", found, async_op, outputs, inputs, (outputs, inputs))


def all_to_all_single(
    output: ArrayLike,
    input: ArrayLike,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send block r of ``input`` to rank r, and join the blocks received in ``output``.

    Parameters
    ----------
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows from and to each rank; equal blocks by default. ValueError if they do not fit the first dimension.
    """
    found = member(group, "all_to_all_single")
    if found is None:
        return None
    size, mine = found.link.size, found.link.rank
    result = as_array(output, "all_to_all_single", name="output")
    x = as_array(input, "all_to_all_single", writable=False, name="input")
    expect_like(result, None, x.dtype, "all_to_all_single", "output")
    received = _byte_counts(result, output_split_sizes, size, "output")
    sent = _byte_counts(x, input_split_sizes, size, "input")
    if received[mine] != sent[mine]:
        raise ArrayError(
            f"all_to_all_single: this rank sends itself {sent[mine]} bytes and expects {received[mine]} from itself"
        )
    return _move("all_to_all_single", found, async_op, (result,), (x,), (result, x, received, sent))


def _byte_counts(x: Array, splits: Sequence[int] | None, size: int, name: str) -> list[int]:
    rows = x.shape[0] if x.ndim else 1
    row_bytes = x.itemsize * math.prod(x.shape[1:])
    if splits is None:
        if rows % size:
            raise ValueError(
                f"all_to_all_single needs `{name}` whose first dimension ({rows}) is divisible by the {size} ranks, or"
                f" {name}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all_single needs {size} {name}_split_sizes that add up to the first dimension of `{name}`"
            f" ({rows}), got {list(splits)}"
        )
    return [count * row_bytes for count in splits]

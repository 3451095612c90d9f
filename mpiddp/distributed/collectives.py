"""Collectives on arrays. A function checks its arguments, gets the plan for arrays like these, and dispatches the call.

The examples of this package show what each of two ranks prints. The tests run the examples on two ranks, after
``import mpiddp as dist``.
"""

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.errors import ArrayError
from mpiddp.mpi.message import as_array, as_arrays, expect_like, like
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import seconds
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import dispatch, expect_on_root, root_rank
from .groups import GroupLike, ProcessGroup, member

# Errors use both names that torch has for these operations.
_GATHER = "all_gather_single (all_gather_into_tensor)"
_SCATTER = "reduce_scatter_single (reduce_scatter_tensor)"
_BARRIER = ("barrier", None)


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until every rank of the group has called this function.

    ``timeout`` is a `timedelta` or seconds; the `DistTimeoutError` names the ranks that are missing.
    `mpiddp.distributed` describes the other arguments, and the errors.

    Examples
    --------
    >>> dist.barrier(timeout=10)
    """
    group = member(group, "barrier")
    if group is None:
        return None
    plan = group._plans.get(_BARRIER) or group._plans.remember(_BARRIER, planning.barrier(group._link))
    return dispatch(group, plan, (None,), (), async_op, None if timeout is None else seconds(timeout))


def broadcast(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copy the array of one rank into those of all others.

    Parameters
    ----------
    tensor : array
        Of the same shape and dtype on all ranks. Rank ``src`` may give a read-only one.
    src, group_src : int
        The rank that sends, as a global rank or as a rank of the group: one of the two.
    group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.full(3, dist.get_rank())
    >>> dist.broadcast(x, src=1)
    >>> x.tolist()
    [1, 1, 1]
    """
    group = member(group, "broadcast")
    if group is None:
        return None
    root = root_rank(group, src, group_src)
    x = as_array(tensor, "broadcast", writable=group._link.rank != root)
    key = ("broadcast", algorithm, root, x.dtype, x.shape, type(x))
    plan = group._plans.get(key) or group._plans.remember(key, planning.make(group._link, *key[:2], x, x, root=root))
    return dispatch(group, plan, (x, root), (x,), async_op)


def all_reduce(
    tensor: ArrayLike,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce the arrays of all ranks elementwise, in place. Every rank gets the same bits.

    Parameters
    ----------
    tensor : array
        Of the same shape and dtype on all ranks.
    op : ReduceOp
        ``SUM`` by default. ``AVG`` and ``PREMUL_SUM`` take floats and complex numbers.
    group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.array([1.0, dist.get_rank()])
    >>> dist.all_reduce(x)
    >>> x.tolist()
    [2.0, 1.0]
    >>> work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    >>> work.wait()
    True
    """
    group = member(group, "all_reduce")
    if group is None:
        return None
    x = as_array(tensor, "all_reduce")
    key = ("all_reduce", algorithm, op, x.dtype, x.shape, type(x))
    plan = group._plans.get(key) or group._plans.remember(key, planning.make(group._link, *key[:2], x, x, op))
    return dispatch(group, plan, (x, op), (x,), async_op)


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
    """Reduce the arrays of all ranks elementwise into the array of one rank. The other arrays stay as they are.

    Parameters
    ----------
    tensor : array
        Of the same shape and dtype on all ranks. Ranks other than ``dst`` may give a read-only one.
    dst, group_dst : int
        The rank that gets the result, as a global rank or as a rank of the group: one of the two.
    op, group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.ones(2)
    >>> dist.reduce(x, dst=0)
    >>> x.tolist() == ([2.0, 2.0] if dist.get_rank() == 0 else [1.0, 1.0])
    True
    """
    group = member(group, "reduce")
    if group is None:
        return None
    root = root_rank(group, dst, group_dst)
    x = as_array(tensor, "reduce", writable=group._link.rank == root)
    key = ("reduce", algorithm, op, root, x.dtype, x.shape, type(x))
    plan = group._plans.get(key) or group._plans.remember(key, planning.make(group._link, *key[:2], x, x, op, root))
    return dispatch(group, plan, (x, root, op), (x,), async_op)


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
    """Copy the arrays of all ranks, in rank order, into one array on every rank.

    Parameters
    ----------
    output_tensor : array
        Of shape ``(size * n, ...)`` or ``(size, n, ...)``, where ``size`` is the number of ranks.
    input_tensor : array
        Of shape ``(n, ...)``, the same on all ranks, and of the dtype of ``output_tensor``.
    group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty((2, 3))
    >>> dist.all_gather_single(x, np.full(3, float(dist.get_rank())))
    >>> x.tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    group = member(group, "all_gather_single")
    if group is None:
        return None
    x = as_array(input_tensor, _GATHER, writable=False, name="input_tensor")
    output = as_array(output_tensor, _GATHER, name="output_tensor")
    key = ("all_gather_single", algorithm, x.dtype, x.shape, output.dtype, output.shape, type(x), type(output))
    plan = group._plans.get(key)
    if plan is None:
        _expect_blocks(output, x, group._link.size, _GATHER, "output_tensor", "input_tensor")
        plan = group._plans.remember(key, planning.make(group._link, *key[:2], output, x))
    return dispatch(group, plan, (output, x), (output,), async_op)


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
    """Reduce the arrays of all ranks elementwise, and give block r of the result to rank r.

    Parameters
    ----------
    output : array
        Of shape ``(n, ...)``, the same on all ranks.
    input : array
        Of shape ``(size * n, ...)`` or ``(size, n, ...)``, where ``size`` is the number of ranks.
    op, group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty(1)
    >>> dist.reduce_scatter_single(x, np.array([10.0, 20.0]))
    >>> x.item() == (20.0 if dist.get_rank() == 0 else 40.0)
    True
    """
    group = member(group, "reduce_scatter_single")
    if group is None:
        return None
    result = as_array(output, _SCATTER, name="output")
    x = as_array(input, _SCATTER, writable=False, name="input")
    key = ("reduce_scatter_single", algorithm, op, x.dtype, x.shape, result.dtype, result.shape, type(x), type(result))
    plan = group._plans.get(key)
    if plan is None:
        _expect_blocks(x, result, group._link.size, _SCATTER, "input", "output")
        plan = group._plans.remember(key, planning.make(group._link, *key[:2], result, x, op))
    return dispatch(group, plan, (result, x, op), (result,), async_op)


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
    """Reduce array r of every rank's list into the array of rank r.

    Parameters
    ----------
    output : array
        Of one shape and dtype on all ranks.
    input_list : sequence of arrays
        One for each rank, each of the shape and dtype of ``output``.
    op, group, async_op, algorithm
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty(1)
    >>> dist.reduce_scatter(x, [np.array([10.0]), np.array([20.0])])
    >>> x.item() == (20.0 if dist.get_rank() == 0 else 40.0)
    True
    """
    group = member(group, "reduce_scatter")
    if group is None:
        return None
    result = as_array(output, "reduce_scatter", name="output")
    inputs, _ = as_arrays(input_list, "reduce_scatter", group._link.size, writable=False, name="input_list")
    for index, given in enumerate(inputs):
        expect_like(given, result.shape, result.dtype, "reduce_scatter", f"input_list[{index}]")
    joined = np.concatenate([given.reshape(-1) for given in inputs])
    key = ("reduce_scatter", algorithm, op, joined.dtype, joined.shape, result.shape, type(joined), type(result))
    plan = group._plans.get(key)
    if plan is None:
        plan = group._plans.remember(key, planning.make(group._link, *key[:2], result, joined, op, count=result.size))
    return dispatch(group, plan, (result, joined, op), (result,), async_op)


def all_gather(
    tensor_list: Sequence[ArrayLike], tensor: ArrayLike, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Copy the array of every rank into the lists of all ranks.

    Parameters
    ----------
    tensor_list : sequence of arrays
        One array for each rank. Array r has the shape and dtype of ``tensor`` on rank r. The arrays share no memory.
    tensor : array
        Shapes may differ between ranks; torch allows that on NCCL only.
    group, async_op
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = [np.empty(1), np.empty(2)]
    >>> dist.all_gather(x, np.full(dist.get_rank() + 1, 7.0))
    >>> [each.tolist() for each in x]
    [[7.0], [7.0, 7.0]]
    """
    group = member(group, "all_gather")
    if group is None:
        return None
    x = as_array(tensor, "all_gather", writable=False)
    outputs, alike = as_arrays(tensor_list, "all_gather", group._link.size)
    key = ("all_gather", x.dtype, x.shape, type(x), alike)
    plan = group._plans.get(key)
    if plan is None:
        _expect_list_like(outputs, x, group, "all_gather", "tensor_list")
        sizes = [output.size for output in outputs]
        layout = "" if min(sizes) == max(sizes) else repr(sizes)
        made = planning.moving(group._link, "all_gather", outputs, (x,), count=sum(sizes), layout=layout)
        plan = group._plans.remember(key, made)
    return dispatch(group, plan, (outputs, x), outputs, async_op)


def _expect_list_like(arrays: Sequence[Array], x: Array, group: ProcessGroup, operation: str, name: str) -> None:
    for index, each in enumerate(arrays):
        shape = x.shape if index == group._link.rank else None
        expect_like(each, shape, x.dtype, operation, f"{name}[{index}]")


def gather(
    tensor: ArrayLike,
    gather_list: Sequence[ArrayLike] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy the array of every rank into the list of one rank.

    Parameters
    ----------
    tensor : array
        Shapes may differ between ranks.
    gather_list : sequence of arrays, optional
        Only rank ``dst`` gives this list. Array r has the shape and dtype of rank r's ``tensor``.
    dst, group_dst : int, default 0
        The rank that gets the arrays, as a global rank or as a rank of the group.
    group, async_op
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = [np.empty(1), np.empty(1)] if dist.get_rank() == 0 else None
    >>> dist.gather(np.array([float(dist.get_rank())]), x, dst=0)
    >>> x is None or [each.item() for each in x] == [0.0, 1.0]
    True
    """
    group = member(group, "gather")
    if group is None:
        return None
    root = root_rank(group, dst, group_dst, default=0)
    x = as_array(tensor, "gather", writable=False)
    expect_on_root(gather_list, group, root, "gather_list", "destination")
    outputs: list[Array] = []
    alike = None
    if gather_list:
        outputs, alike = as_arrays(gather_list, "gather", group._link.size, name="gather_list")
    key = ("gather", root, x.dtype, x.shape, type(x), alike)
    plan = group._plans.get(key)
    if plan is None:
        _expect_list_like(outputs, x, group, "gather", "gather_list")
        plan = group._plans.remember(key, planning.moving(group._link, "gather", outputs, (x,), root=root))
    return dispatch(group, plan, (outputs, x, root), outputs, async_op)


def scatter(
    tensor: ArrayLike,
    scatter_list: Sequence[ArrayLike] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy array r of one rank's list into the array of rank r.

    Parameters
    ----------
    tensor : array
        Shapes may differ between ranks.
    scatter_list : sequence of arrays, optional
        Only rank ``src`` gives this list. Array r has the shape and dtype of rank r's ``tensor``.
    src, group_src : int, default 0
        The rank that sends, as a global rank or as a rank of the group.
    group, async_op
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty(1)
    >>> dist.scatter(x, [np.zeros(1), np.ones(1)] if dist.get_rank() == 0 else None, src=0)
    >>> x.item() == dist.get_rank()
    True
    """
    group = member(group, "scatter")
    if group is None:
        return None
    root = root_rank(group, src, group_src, default=0)
    x = as_array(tensor, "scatter")
    expect_on_root(scatter_list, group, root, "scatter_list", "source")
    inputs = alike = None
    if scatter_list:
        inputs, alike = as_arrays(scatter_list, "scatter", group._link.size, writable=False, name="scatter_list")
    key = ("scatter", root, x.dtype, x.shape, type(x), alike)
    plan = group._plans.get(key)
    if plan is None:
        _expect_list_like(inputs or (), x, group, "scatter", "scatter_list")
        plan = group._plans.remember(key, planning.moving(group._link, "scatter", (x,), inputs or (), root=root))
    return dispatch(group, plan, (x, inputs, root), (x,), async_op)


def all_to_all(
    output_tensor_list: Sequence[ArrayLike],
    input_tensor_list: Sequence[ArrayLike],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send one array to every rank, and receive one from every rank.

    Parameters
    ----------
    output_tensor_list : sequence of arrays
        Array r has the shape of what rank r sends to this rank. The arrays share no memory.
    input_tensor_list : sequence of arrays
        Array r goes to rank r. Shapes may differ; all arrays have one dtype.
    group, async_op
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x, y = [np.empty(1), np.empty(1)], [np.array([10.0 * dist.get_rank() + to]) for to in (0, 1)]
    >>> dist.all_to_all(x, y)
    >>> [each.item() for each in x] == [dist.get_rank(), 10.0 + dist.get_rank()]
    True
    """
    group = member(group, "all_to_all")
    if group is None:
        return None
    size = group._link.size
    outputs, alike = as_arrays(output_tensor_list, "all_to_all", size, name="output_tensor_list")
    inputs, sent = as_arrays(input_tensor_list, "all_to_all", size, writable=False, name="input_tensor_list")
    key = ("all_to_all", alike, sent)
    plan = group._plans.get(key)
    if plan is None:
        mine = inputs[group._link.rank]
        _expect_list_like(outputs, mine, group, "all_to_all", "output_tensor_list")
        _expect_list_like(inputs, mine, group, "all_to_all", "input_tensor_list")
        plan = group._plans.remember(key, planning.moving(group._link, "all_to_all", outputs, inputs))
    return dispatch(group, plan, (outputs, inputs), outputs, async_op)


def all_to_all_single(
    output: ArrayLike,
    input: ArrayLike,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send one block of rows to every rank, and join the blocks that arrive in rank order.

    Parameters
    ----------
    output, input : array
        Of one dtype; the first dimension is cut into a block for each rank.
    output_split_sizes, input_split_sizes : sequence of int, optional
        The number of rows from and to each rank. Blocks are equal by default. ValueError if they do not add up.
    group, async_op
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty(2)
    >>> dist.all_to_all_single(x, 10.0 * dist.get_rank() + np.arange(2.0))
    >>> x.tolist() == [dist.get_rank(), 10.0 + dist.get_rank()]
    True
    """
    group = member(group, "all_to_all_single")
    if group is None:
        return None
    result = as_array(output, "all_to_all_single", name="output")
    x = as_array(input, "all_to_all_single", writable=False, name="input")
    received_rows = None if output_split_sizes is None else tuple(output_split_sizes)
    sent_rows = None if input_split_sizes is None else tuple(input_split_sizes)
    key = ("all_to_all_single", received_rows, sent_rows, like(result), like(x))
    plan = group._plans.get(key)
    if plan is None:
        size, mine = group._link.size, group._link.rank
        expect_like(result, None, x.dtype, "all_to_all_single", "output")
        received = _byte_counts(result, received_rows, size, "output")
        sent = _byte_counts(x, sent_rows, size, "input")
        if received[mine] != sent[mine]:
            raise ArrayError(
                f"all_to_all_single: this rank sends itself {sent[mine]} bytes and expects {received[mine]} from itself"
            )
        made = planning.moving(group._link, "all_to_all_single", (result,), (x,), counts=(received, sent))
        plan = group._plans.remember(key, made)
    return dispatch(group, plan, (result, x), (result,), async_op)


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

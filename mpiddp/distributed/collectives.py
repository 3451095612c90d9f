"""The collectives on arrays, blocking and asynchronous.

Each of them checks its arguments before anything is sent, finds the plan of the call, and dispatches it. They share:

- Arrays are NumPy or CuPy arrays, C-contiguous, aligned and in native byte order, or objects that hold one (a Tensor).
- ``group`` : ProcessGroup, optional. The ranks that take part; all by default. On a rank that is not in the group a
  call warns and returns None.
- ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group: one of the two.
- ``async_op`` : bool, default False. Return a `Work` at once, instead of waiting for the end and returning None.
- ``algorithm`` : str, optional. An algorithm that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures; it
  goes before ``MPIDDP_ALGORITHM`` and the table, and is equal on all ranks.

They raise TypeError for an argument that is no array, and for a reduction that the dtype does not have; `ArrayError`
for an array that cannot be sent or written to as it is, or does not fit the others of the call; ValueError for a rank
that is not in the group, and for an unknown algorithm; `MismatchError` if ranks differ in operation, size, dtype, root
or reduction; `DistTimeoutError` if a rank does not come within the group's timeout, where a wait inside of MPI ends the
job with the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.errors import ArrayError
from mpiddp.faults.calls import ANY_COUNT, NO_ROOT, make_call
from mpiddp.mpi.message import as_array, as_arrays, expect_like
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import seconds
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from . import debug
from .dispatch import dispatch, keep, root_rank
from .groups import GroupLike, ProcessGroup, member

# Names in errors of operations that have two names in torch.
_GATHER = "all_gather_single (all_gather_into_tensor)"
_SCATTER = "reduce_scatter_single (reduce_scatter_tensor)"
_BARRIER = ("barrier", None)


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here (``torch.distributed.barrier``).

    Parameters
    ----------
    group, async_op
        See `mpiddp.distributed.collectives`.
    device_ids
        Accepted for compatibility.
    timeout : timedelta or float, optional
        Time that this call, or ``wait()`` of its `Work`, may take; a number is seconds; the group's by default.

    Raises
    ------
    DistTimeoutError
        If a rank does not come within ``timeout``, with the ranks that are missing.
    """
    found = member(group, "barrier")
    if found is None:
        return None
    plan = found.plans.get(_BARRIER) or keep(found, _BARRIER, planning.barrier(found.link))
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
    """Copy the array of rank ``src`` into those of all ranks (``torch.distributed.broadcast``).

    Parameters
    ----------
    tensor : array
        Input on rank ``src``, output elsewhere; of equal shape and dtype on all ranks.
    src, group_src : int
        The rank that sends.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.

    Examples
    --------
    >>> dist.broadcast(x, src=0)  # doctest: +SKIP
    """
    found = member(group, "broadcast")
    if found is None:
        return None
    root = root_rank(found, src, group_src)
    x = as_array(tensor, "broadcast", writable=found.link.rank != root)
    key = ("broadcast", algorithm, root, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or keep(found, key, planning.make(found.link, *key[:2], x, x, root=root))
    return dispatch(found, plan, (x, root), (x,), async_op)


def all_reduce(
    tensor: ArrayLike,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce the arrays of all ranks elementwise (``torch.distributed.all_reduce``).

    Every rank's array becomes the result, with the same bits.

    Parameters
    ----------
    tensor : array
        Input and output, of equal shape and dtype on all ranks.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.

    Examples
    --------
    >>> dist.all_reduce(gradient, op=dist.ReduceOp.AVG)  # doctest: +SKIP
    """
    found = member(group, "all_reduce")
    if found is None:
        return None
    x = as_array(tensor, "all_reduce")
    key = ("all_reduce", algorithm, op, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or keep(found, key, planning.make(found.link, *key[:2], x, x, op))
    return dispatch(found, plan, (x, op), (x,), async_op)


def all_reduce_bucket(x: Array, op: ReduceOp, group: ProcessGroup, index: int) -> Work:
    """Begin the all-reduce of a bucket of gradients; errors and logs name the bucket, as the program wrote no call."""
    name = planning.bucket_name(index)
    member(group, name)
    key = (name, None, op, x.dtype, x.shape, type(x))
    plan = group.plans.get(key) or keep(group, key, planning.make(group.link, *key[:2], x, x, op))
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
    """Reduce the arrays of all ranks into that of rank ``dst`` (``torch.distributed.reduce``).

    The arrays of the other ranks stay as they are: torch's Gloo and NCCL leave partial sums in them.

    Parameters
    ----------
    tensor : array
        Input, and on rank ``dst`` output, of equal shape and dtype on all ranks.
    dst, group_dst : int
        The rank that gets the result.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.
    """
    found = member(group, "reduce")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst)
    x = as_array(tensor, "reduce", writable=found.link.rank == root)
    key = ("reduce", algorithm, op, root, x.dtype, x.shape, type(x))
    plan = found.plans.get(key) or keep(found, key, planning.make(found.link, *key[:2], x, x, op, root))
    return dispatch(found, plan, (x, root, op), (x,), async_op)


def _expect_blocks(whole: Array, part: Array, size: int, operation: str, whole_name: str, part_name: str) -> None:
    """Raise unless ``whole`` holds ``size`` blocks like ``part``, concatenated or stacked."""
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
    """Copy every rank's array to all ranks, one after the other into one array.

    Follows ``torch.distributed.all_gather_single``; `all_gather_into_tensor` is its older name.

    Parameters
    ----------
    output_tensor : array
        Shape ``(size * n, ...)`` (concatenated) or ``(size, n, ...)`` (stacked).
    input_tensor : array
        Shape ``(n, ...)``, equal on all ranks.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.
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
        plan = keep(found, key, planning.make(found.link, *key[:2], output, x, places=(0, 1)))
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
    """Reduce one array of ``size`` blocks over all ranks and leave block r in rank r's ``output``.

    Follows ``torch.distributed.reduce_scatter_single``; `reduce_scatter_tensor` is its older name.

    Parameters
    ----------
    output : array
        Shape ``(n, ...)``, equal on all ranks.
    input : array
        Shape ``(size * n, ...)`` (concatenated) or ``(size, n, ...)`` (stacked).
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.
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
        plan = keep(found, key, planning.make(found.link, *key[:2], result, x, op, places=(0, 1)))
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
    """Reduce ``input_list[r]`` over all ranks into rank r's ``output`` (``torch.distributed.reduce_scatter``).

    Parameters
    ----------
    output : array
        This rank's result; of equal shape and dtype on all ranks.
    input_list : list of arrays
        One for each rank, like ``output``.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group, async_op, algorithm
        See `mpiddp.distributed.collectives`.
    """
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
        plan = keep(found, key, made)
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
    algorithm: str = "",
) -> Work | None:
    """Dispatch an operation that only moves data; no table chooses its algorithm."""
    steps: Callable[..., Any]
    steps, on_device = planning.moving(algorithm or name, group.link, *outputs, *inputs)
    like = (*outputs, *inputs)[0]
    call = make_call(name, like.dtype, None, count, root, layout, on_device=on_device)
    plan = planning.plain(steps, call)
    return dispatch(group, debug.traced(plan), args, outputs, async_op)


def all_gather(
    tensor_list: Sequence[ArrayLike], tensor: ArrayLike, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Copy every rank's array to all ranks, rank r's into ``tensor_list[r]`` (``torch.distributed.all_gather``).

    Parameters
    ----------
    tensor_list : list of arrays
        One for each rank, of that rank's shape: shapes may differ (on NCCL only, in torch). Where they are not known,
        `all_gather_object` needs none.
    tensor : array
        This rank's; has the shape of ``tensor_list[rank]``.
    group, async_op
        See `mpiddp.distributed.collectives`.
    """
    found = member(group, "all_gather")
    if found is None:
        return None
    x = as_array(tensor, "all_gather", writable=False)
    outputs = as_arrays(tensor_list, "all_gather", found.link.size)
    _expect_list_like(outputs, x, found, "all_gather", "tensor_list")
    sizes = [output.size for output in outputs]
    layout = "" if min(sizes) == max(sizes) else repr(sizes)
    args = (outputs, x)
    return _move(
        "all_gather", found, async_op, outputs, (x,), args, count=sum(sizes), layout=layout, algorithm="all_gather_list"
    )


def _expect_list_like(arrays: Sequence[Array], x: Array, group: ProcessGroup, operation: str, name: str) -> None:
    """Raise unless the arrays have the dtype of ``x``, and this rank's its shape."""
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
    """Copy every rank's array to rank ``dst``, rank r's into ``gather_list[r]`` (``torch.distributed.gather``).

    Parameters
    ----------
    tensor : array
        This rank's; shapes may differ from rank to rank.
    gather_list : list of arrays, optional
        The outputs, one for each rank, of that rank's shape; on rank ``dst`` only, where it must be given.
    dst, group_dst : int, default 0
        The rank that gathers.
    group, async_op
        See `mpiddp.distributed.collectives`.
    """
    found = member(group, "gather")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst, default=0)
    x = as_array(tensor, "gather", writable=False)
    outputs = _on_root(gather_list, found, root, "gather", "gather_list", "destination", writable=True)
    _expect_list_like(outputs or (), x, found, "gather", "gather_list")
    return _move("gather", found, async_op, outputs or (), (x,), (outputs, x, root), root=root)


def _on_root(
    given: Sequence[ArrayLike] | None,
    group: ProcessGroup,
    root: int,
    operation: str,
    name: str,
    role: str,
    writable: bool,
) -> list[Array] | None:
    """Return the arrays of a list that is required on the root and forbidden elsewhere."""
    if group.link.rank == root:
        if not given:
            raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
        return as_arrays(given, operation, group.link.size, writable=writable, name=name)
    if given:
        raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")
    return None


def scatter(
    tensor: ArrayLike,
    scatter_list: Sequence[ArrayLike] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``scatter_list[r]`` of rank ``src`` into rank r's array (``torch.distributed.scatter``).

    Parameters
    ----------
    tensor : array
        The output; shapes may differ from rank to rank.
    scatter_list : list of arrays, optional
        The inputs, one for each rank, of that rank's shape; on rank ``src`` only, where it must be given.
    src, group_src : int, default 0
        The rank that sends.
    group, async_op
        See `mpiddp.distributed.collectives`.
    """
    found = member(group, "scatter")
    if found is None:
        return None
    root = root_rank(found, src, group_src, default=0)
    x = as_array(tensor, "scatter")
    inputs = _on_root(scatter_list, found, root, "scatter", "scatter_list", "source", writable=False)
    _expect_list_like(inputs or (), x, found, "scatter", "scatter_list")
    return _move("scatter", found, async_op, (x,), inputs or (), (x, inputs, root), root=root)


def all_to_all(
    output_tensor_list: Sequence[ArrayLike],
    input_tensor_list: Sequence[ArrayLike],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Copy ``input_tensor_list[s]`` of rank r to ``output_tensor_list[r]`` of rank s, for all r and s.

    Follows ``torch.distributed.all_to_all``.

    Parameters
    ----------
    output_tensor_list : list of arrays
        One for each rank, of the shape of its input; all of one dtype.
    input_tensor_list : list of arrays
        One for each rank; shapes may differ.
    group, async_op
        See `mpiddp.distributed.collectives`.
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
    """Cut one array into blocks along its first dimension, send block r to rank r, and join the incoming ones.

    Follows ``torch.distributed.all_to_all_single``.

    Parameters
    ----------
    output : array
        The incoming blocks, that of rank r at r.
    input : array
        The outgoing blocks; of the dtype of ``output``, on all ranks.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows from and to each rank; equal blocks by default.
    group, async_op
        See `mpiddp.distributed.collectives`.

    Raises
    ------
    ArrayError
        Also if this rank expects of itself another block than it sends itself.
    ValueError
        If the sizes do not add up to the first dimension, or the ranks do not divide it.
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
    """Return the bytes of each block along the first dimension of ``x``."""
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

"""The collectives on arrays, blocking and asynchronous.

Each checks what it was given before anything is sent, and submits the steps of an algorithm; that is all in which they
differ. ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group. A call returns None,
or a `Work` where ``async_op`` is true; on a rank that is not in the group it warns and returns None. Every array may be
a NumPy or CuPy array, C-contiguous and in native byte order, or hold one (a Tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mpiddp.algorithms import agreement, native, select
from mpiddp.errors import ArrayError
from mpiddp.mpi import board, operation, work
from mpiddp.mpi.board import ANY_COUNT, NO_ROOT
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_array, as_arrays, dtype_code, expect_like
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps, Work
from mpiddp.typing import Array, ArrayLike

from . import debug
from .groups import GroupLike, ProcessGroup, member

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
    timeout: timedelta | float | None = None,
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

    Raises
    ------
    MismatchError
        If ranks of the node call something else.
    """
    link = group.link
    key = (name, algorithm, None if like is None else like.dtype, op, layout)
    kind = _kinds.get(key) or _kind(*key)
    if debug.on:
        return _perform_observed(name, link, kind, count, root, async_op, outputs, algorithm, args, timeout)
    same = link.begin(kind, count, root)
    # Half the time of Operation(...), which is more than the rest of this function takes.
    what = _new_tuple(Operation, (name, link, outputs[0] if outputs else None, None, False, link.sequence))
    if not async_op and not work.unfinished and timeout is None:
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
    steps = algorithm(link, *args)
    submitted = link.queue.submit(steps if same else link.confirming(steps), what, list(outputs))
    if timeout is not None:
        submitted.limit(work.seconds(timeout))
    if async_op:
        return submitted
    submitted.wait()
    return submitted.value


_Key = tuple[str, Callable[..., Steps], np.dtype[Any] | None, ReduceOp | None, str]
_kinds: dict[_Key, int] = {}
_MOST_KINDS = 4096


def _kind(
    name: str, algorithm: Callable[..., Steps], dtype: np.dtype[Any] | None, op: ReduceOp | None, layout: str
) -> int:
    """Return, and remember, by what number the ranks know such calls."""
    number = board.kind(
        name,
        board.NO_DTYPE if dtype is None else dtype_code(dtype) | board.ON_DEVICE * select.is_for_devices(algorithm),
        board.NO_REDUCTION if op is None else op.value,
        layout,
        board.compares(algorithm),
    )
    if len(_kinds) >= _MOST_KINDS:  # layouts come and go
        _kinds.clear()
    _kinds[name, algorithm, dtype, op, layout] = number
    return number


def _perform_observed(
    name: str,
    link: Link,
    kind: int,
    count: int,
    root: int,
    async_op: bool,
    outputs: Sequence[Array],
    algorithm: Callable[..., Steps],
    args: tuple[Any, ...],
    timeout: timedelta | float | None,
) -> Any:
    """Do what `perform` does, under the eyes of `debug`."""
    same = link.begin(kind | board.AGREES if debug.detail else kind, count, root)
    what = Operation(name, link, outputs[0] if outputs else None, number=link.sequence)
    debug.log(what)
    observed = debug.Observed(name, algorithm, outputs) if debug.detail else None
    steps = (observed or algorithm)(link, *args)
    submitted = link.queue.submit(steps if same else link.confirming(steps), what, list(outputs))
    if observed is not None and observed.watched is not None:
        submitted.verify(observed.watched.check)
    if timeout is not None:
        submitted.limit(work.seconds(timeout))
    if async_op:
        return submitted
    submitted.wait()
    return submitted.value


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


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here (``torch.distributed.barrier``).

    Parameters
    ----------
    timeout : timedelta or float, optional
        How long this call, or ``wait()`` of its Work, may take, in seconds where it is a number; DistTimeoutError names
        the missing ranks.
    device_ids
        Accepted for compatibility.
    """
    found = member(group, "barrier")
    if found is None:
        return None
    algorithm = native.barrier if found.link.one_node else agreement.barrier
    return perform("barrier", found, async_op, (), algorithm, timeout=work.seconds(timeout))  # type: ignore[no-any-return]


def _recorded(
    group: ProcessGroup,
    name: str,
    op: ReduceOp | None,
    arrays: tuple[Array, ...],
    async_op: bool,
    algorithm: str | None,
) -> Any:
    """Leave a call to the end of a coalescing block, which goes by the table."""
    assert group.coalescing is not None
    if algorithm is not None:
        raise ValueError(f"{name} cannot take algorithm={algorithm!r} where calls are coalesced; MPIDDP_ALGORITHM can")
    return group.coalescing.record(name, op, arrays, async_op)


def broadcast(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copy the array of rank ``src`` into those of all ranks; shapes and dtypes are equal.

    Parameters
    ----------
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Examples
    --------
    >>> dist.broadcast(x, src=0)  # doctest: +SKIP
    """
    found = member(group, "broadcast")
    if found is None:
        return None
    root = root_rank(found, src, group_src)
    x = as_array(tensor, "broadcast", writable=found.link.rank != root)
    steps = select.choose("broadcast", found.link, x, asked=algorithm)
    name = select.called("broadcast", algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (x,), steps, x, root, like=x, count=x.size, root=root
    )


def all_reduce(
    tensor: ArrayLike,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce the arrays of all ranks elementwise; every rank's array becomes the result, with the same bits.

    Parameters
    ----------
    tensor : array
        Input and output, of equal shape and dtype on all ranks.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Examples
    --------
    >>> dist.all_reduce(gradient, op=dist.ReduceOp.AVG)  # doctest: +SKIP
    """
    found = member(group, "all_reduce")
    if found is None:
        return None
    x = as_array(tensor, "all_reduce")
    if found.coalescing is not None:
        return _recorded(found, "all_reduce", op, (x,), async_op, algorithm)  # type: ignore[no-any-return]
    steps = select.choose("all_reduce", found.link, x, op, algorithm)
    name = "all_reduce" if algorithm is None else select.called("all_reduce", algorithm)
    return perform(name, found, async_op, (x,), steps, x, op, like=x, count=x.size, op=op)  # type: ignore[no-any-return]


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
    """Reduce the arrays of all ranks into that of rank ``dst``; ``algorithm`` as in `all_reduce`.

    The arrays of the other ranks stay as they are: torch's Gloo and NCCL leave partial sums in them.
    """
    found = member(group, "reduce")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst)
    x = as_array(tensor, "reduce", writable=found.link.rank == root)
    steps = select.choose("reduce", found.link, x, op, algorithm)
    name = select.called("reduce", algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (x,), steps, x, root, op, like=x, count=x.size, op=op, root=root
    )


def all_gather(
    tensor_list: Sequence[ArrayLike], tensor: ArrayLike, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Copy every rank's array to all ranks, rank r's into ``tensor_list[r]``.

    Parameters
    ----------
    tensor_list : list of arrays
        One for each rank, of that rank's shape: shapes may differ (on NCCL only, in torch). Where they are not known,
        `all_gather_object` needs none.
    tensor : array
        This rank's; has the shape of ``tensor_list[rank]``.
    """
    found = member(group, "all_gather")
    if found is None:
        return None
    x = as_array(tensor, "all_gather", writable=False)
    outputs = as_arrays(tensor_list, "all_gather", found.link.size)
    for index, output in enumerate(outputs):
        mine = index == found.link.rank
        expect_like(output, x.shape if mine else None, x.dtype, "all_gather", f"tensor_list[{index}]")
    sizes = [output.size for output in outputs]
    layout = "" if min(sizes) == max(sizes) else repr(sizes)
    algorithm = select.moving("all_gather_list", found.link, *outputs, x)
    return perform(  # type: ignore[no-any-return]
        "all_gather",
        found,
        async_op,
        outputs,
        algorithm,
        outputs,
        x,
        like=x,
        count=sum(sizes),
        layout=layout,
    )


def _expect_blocks(whole: Array, part: Array, size: int, operation: str, whole_name: str, part_name: str) -> None:
    """Check that ``whole`` holds ``size`` blocks like ``part``, one after the other or stacked."""
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
    """Copy every rank's array to all ranks, one after the other into one array; ``algorithm`` as in `all_reduce`.

    Parameters
    ----------
    output_tensor : array
        Shape ``(size * n, ...)`` (concatenated) or ``(size, n, ...)`` (stacked).
    input_tensor : array
        Shape ``(n, ...)``, equal on all ranks.
    """
    found = member(group, "all_gather_single")
    if found is None:
        return None
    x = as_array(input_tensor, "all_gather_single", writable=False, name="input_tensor")
    output = as_array(output_tensor, "all_gather_single", name="output_tensor")
    _expect_blocks(output, x, found.link.size, "all_gather_single", "output_tensor", "input_tensor")
    if found.coalescing is not None:
        return _recorded(found, "all_gather_single", None, (output, x), async_op, algorithm)  # type: ignore[no-any-return]
    steps = select.choose("all_gather", found.link, output, asked=algorithm)
    name = select.called("all_gather_single", algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (output,), steps, output, x, like=x, count=x.size
    )


all_gather_into_tensor = all_gather_single


def gather(
    tensor: ArrayLike,
    gather_list: Sequence[ArrayLike] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy every rank's array to rank ``dst`` (default 0), rank r's into ``gather_list[r]``.

    Parameters
    ----------
    gather_list : list of arrays
        On rank ``dst`` only, where it must be given; shapes may differ from rank to rank.
    """
    found = member(group, "gather")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst, default=0)
    x = as_array(tensor, "gather", writable=False)
    outputs = _on_root(gather_list, found, root, "gather", "gather_list", "destination", writable=True)
    for index, output in enumerate(outputs or ()):
        mine = index == found.link.rank
        expect_like(output, x.shape if mine else None, x.dtype, "gather", f"gather_list[{index}]")
    algorithm = select.moving("gather", found.link, *(outputs or ()), x)
    return perform(  # type: ignore[no-any-return]
        "gather", found, async_op, outputs or (), algorithm, outputs, x, root, like=x, root=root
    )


def _on_root(
    given: Sequence[ArrayLike] | None,
    group: ProcessGroup,
    root: int,
    operation: str,
    name: str,
    role: str,
    writable: bool,
) -> list[Array] | None:
    """Return the arrays of a list that must be given on the root and nowhere else."""
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
    """Copy ``scatter_list[r]`` of rank ``src`` (default 0) into rank r's array.

    Parameters
    ----------
    scatter_list : list of arrays
        On rank ``src`` only, where it must be given.
    """
    found = member(group, "scatter")
    if found is None:
        return None
    root = root_rank(found, src, group_src, default=0)
    x = as_array(tensor, "scatter")
    inputs = _on_root(scatter_list, found, root, "scatter", "scatter_list", "source", writable=False)
    for index, given in enumerate(inputs or ()):
        mine = index == found.link.rank
        expect_like(given, x.shape if mine else None, x.dtype, "scatter", f"scatter_list[{index}]")
    algorithm = select.moving("scatter", found.link, x, *(inputs or ()))
    return perform(  # type: ignore[no-any-return]
        "scatter", found, async_op, (x,), algorithm, x, inputs, root, like=x, root=root
    )


def reduce_scatter(
    output: ArrayLike,
    input_list: Sequence[ArrayLike],
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduce ``input_list[r]`` over all ranks into rank r's ``output``; shapes are equal.

    ``algorithm`` as in `all_reduce`.
    """
    found = member(group, "reduce_scatter")
    if found is None:
        return None
    result = as_array(output, "reduce_scatter", name="output")
    inputs = as_arrays(input_list, "reduce_scatter", found.link.size, writable=False, name="input_list")
    for index, given in enumerate(inputs):
        expect_like(given, result.shape, result.dtype, "reduce_scatter", f"input_list[{index}]")
    joined = np.concatenate([given.reshape(-1) for given in inputs])
    return perform(  # type: ignore[no-any-return]
        select.called("reduce_scatter", algorithm),
        found,
        async_op,
        (result,),
        select.choose("reduce_scatter", found.link, joined, op, algorithm),
        result,
        joined,
        op,
        like=result,
        count=result.size,
        op=op,
    )


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

    ``algorithm`` as in `all_reduce`.

    Parameters
    ----------
    output : array
        Shape ``(n, ...)``.
    input : array
        Shape ``(size * n, ...)`` or ``(size, n, ...)``.
    """
    found = member(group, "reduce_scatter_single")
    if found is None:
        return None
    result = as_array(output, "reduce_scatter_single", name="output")
    x = as_array(input, "reduce_scatter_single", writable=False, name="input")
    _expect_blocks(x, result, found.link.size, "reduce_scatter_single", "input", "output")
    if found.coalescing is not None:
        return _recorded(found, "reduce_scatter_single", op, (result, x), async_op, algorithm)  # type: ignore[no-any-return]
    steps = select.choose("reduce_scatter", found.link, x, op, algorithm)
    name = select.called("reduce_scatter_single", algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (result,), steps, result, x, op, like=x, count=x.size, op=op
    )


reduce_scatter_tensor = reduce_scatter_single


def all_to_all(
    output_tensor_list: Sequence[ArrayLike],
    input_tensor_list: Sequence[ArrayLike],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Copy ``input_tensor_list[s]`` of rank r to ``output_tensor_list[r]`` of rank s, for all r and s."""
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
    algorithm = select.moving("all_to_all", found.link, *outputs, *inputs)
    return perform(  # type: ignore[no-any-return]
        "all_to_all", found, async_op, outputs, algorithm, outputs, inputs, like=outputs[0]
    )


def _byte_counts(x: Array, splits: Sequence[int] | None, size: int, name: str) -> list[int]:
    """Return the bytes of the blocks along the first dimension of ``x``."""
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


def all_to_all_single(
    output: ArrayLike,
    input: ArrayLike,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Cut one array into blocks along its first dimension, send block r to rank r, and join what comes back.

    Parameters
    ----------
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows from and to each rank; equal blocks by default.
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
    algorithm = select.moving("all_to_all_single", found.link, result, x)
    return perform(  # type: ignore[no-any-return]
        "all_to_all_single", found, async_op, (result,), algorithm, result, x, received, sent, like=x
    )

"""The collectives on one array of each rank, blocking and asynchronous.

Those on lists of arrays are in `lists`, the exchanges of all with all in `exchange`. Each of them checks what it was
given before anything is sent, and submits the steps of an algorithm; that is all in which they differ. ``src`` and
``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group. A call returns None, or a `Work` where
``async_op`` is true; on a rank that is not in the group it warns and returns None. Every array may be a NumPy or CuPy
array, C-contiguous, aligned and in native byte order, or hold one (a Tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mpiddp.algorithms import handshake, native, one_shot, plan
from mpiddp.errors import ArrayError
from mpiddp.mpi import work
from mpiddp.mpi.message import as_array, expect_like
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps, Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import again, perform, root_rank
from .groups import GroupLike, ProcessGroup, member

# What errors call operations that have two names in torch.
_GATHER = "all_gather_single (all_gather_into_tensor)"
_SCATTER = "reduce_scatter_single (reduce_scatter_tensor)"


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here (``torch.distributed.barrier``).

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    device_ids
        Accepted for compatibility.
    timeout : timedelta or float, optional
        How long this call, or ``wait()`` of its Work, may take; a number is seconds; the group's by default.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    MismatchError
        If ranks call another operation.
    DistTimeoutError
        If a rank does not come within ``timeout``, with the ranks that are missing; where none is given, a wait inside
        of MPI ends the job with this text.
    """
    found = member(group, "barrier")
    if found is None:
        return None
    if found.link.slots is not None:
        algorithm: Callable[..., Steps] = one_shot.barrier
    else:
        algorithm = native.barrier if found.link.one_node else handshake.barrier
    return perform("barrier", found, async_op, (), algorithm, timeout_s=work.seconds(timeout))  # type: ignore[no-any-return]


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
    """Copy the array of rank ``src`` into those of all ranks (``torch.distributed.broadcast``).

    Parameters
    ----------
    tensor : array
        Input on rank ``src``, output elsewhere; of equal shape and dtype on all ranks.
    src, group_src : int
        The rank that sends, as a global rank or as a rank of the group: one of the two.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If an argument is no array.
    ArrayError
        If an array cannot be sent as it is, or written to.
    ValueError
        If the group has no such rank, or there is no such algorithm.
    MismatchError
        If ranks differ in size, dtype or root, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.

    Examples
    --------
    >>> dist.broadcast(x, src=0)  # doctest: +SKIP
    """
    found = member(group, "broadcast")
    if found is None:
        return None
    root = root_rank(found, src, group_src)
    x = as_array(tensor, "broadcast", writable=found.link.rank != root)
    name = plan.called("broadcast", algorithm)
    if again(name, found, async_op, x, x, None, root):
        return None
    steps = plan.choose("broadcast", found.link, x, asked=algorithm)
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
    """Reduce the arrays of all ranks elementwise (``torch.distributed.all_reduce``).

    Every rank's array becomes the result, with the same bits.

    Parameters
    ----------
    tensor : array
        Input and output, of equal shape and dtype on all ranks.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If an argument is no array; if there is no such reduction of the dtype.
    ArrayError
        If an array cannot be sent as it is, or written to.
    ValueError
        If there is no such algorithm.
    MismatchError
        If ranks differ in size, dtype or reduction, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.

    Examples
    --------
    >>> dist.all_reduce(gradient, op=dist.ReduceOp.AVG)  # doctest: +SKIP
    """
    found = member(group, "all_reduce")
    if found is None:
        return None
    x = as_array(tensor, "all_reduce")
    name = plan.called("all_reduce", algorithm)
    if again(name, found, async_op, x, x, op):
        return None
    if found.coalescing is not None:
        return _recorded(found, "all_reduce", op, (x,), async_op, algorithm)  # type: ignore[no-any-return]
    steps = plan.choose("all_reduce", found.link, x, op, algorithm)
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
    """Reduce the arrays of all ranks into that of rank ``dst`` (``torch.distributed.reduce``).

    The arrays of the other ranks stay as they are: torch's Gloo and NCCL leave partial sums in them.

    Parameters
    ----------
    tensor : array
        Input, and on rank ``dst`` output, of equal shape and dtype on all ranks.
    dst, group_dst : int
        The rank that gets the result, as a global rank or as a rank of the group: one of the two.
    op : ReduceOp, default ``ReduceOp.SUM``
        The reduction, equal on all ranks.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If an argument is no array; if there is no such reduction of the dtype.
    ArrayError
        If an array cannot be sent as it is, or written to.
    ValueError
        If the group has no such rank, or there is no such algorithm.
    MismatchError
        If ranks differ in size, dtype, reduction or root, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
    """
    found = member(group, "reduce")
    if found is None:
        return None
    root = root_rank(found, dst, group_dst)
    x = as_array(tensor, "reduce", writable=found.link.rank == root)
    name = plan.called("reduce", algorithm)
    if again(name, found, async_op, x, x, op, root):
        return None
    steps = plan.choose("reduce", found.link, x, op, algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (x,), steps, x, root, op, like=x, count=x.size, op=op, root=root
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
    """Copy every rank's array to all ranks, one after the other into one array.

    Follows ``torch.distributed.all_gather_single``; `all_gather_into_tensor` is its older name.

    Parameters
    ----------
    output_tensor : array
        Shape ``(size * n, ...)`` (concatenated) or ``(size, n, ...)`` (stacked).
    input_tensor : array
        Shape ``(n, ...)``, equal on all ranks.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If an argument is no array.
    ArrayError
        If an array cannot be sent as it is, or the output has not the shape or dtype.
    ValueError
        If there is no such algorithm.
    MismatchError
        If ranks differ in size or dtype, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
    """
    found = member(group, "all_gather_single")
    if found is None:
        return None
    x = as_array(input_tensor, _GATHER, writable=False, name="input_tensor")
    output = as_array(output_tensor, _GATHER, name="output_tensor")
    name = plan.called("all_gather_single", algorithm)
    if again(name, found, async_op, output, x):
        return None
    _expect_blocks(output, x, found.link.size, _GATHER, "output_tensor", "input_tensor")
    if found.coalescing is not None:
        return _recorded(found, "all_gather_single", None, (output, x), async_op, algorithm)  # type: ignore[no-any-return]
    steps = plan.choose("all_gather", found.link, output, asked=algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (output,), steps, output, x, like=x, count=x.size
    )


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
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.
    algorithm : str, optional
        One of those that ``python -m mpiddp bench OPERATION --algorithm NAME`` measures, instead of what the table and
        ``MPIDDP_ALGORITHM`` say; equal on all ranks.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If an argument is no array; if there is no such reduction of the dtype.
    ArrayError
        If an array cannot be sent as it is, or the input has not the shape or dtype.
    ValueError
        If there is no such algorithm.
    MismatchError
        If ranks differ in size, dtype or reduction, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
    """
    found = member(group, "reduce_scatter_single")
    if found is None:
        return None
    result = as_array(output, _SCATTER, name="output")
    x = as_array(input, _SCATTER, writable=False, name="input")
    name = plan.called("reduce_scatter_single", algorithm)
    if again(name, found, async_op, result, x, op):
        return None
    _expect_blocks(x, result, found.link.size, _SCATTER, "input", "output")
    if found.coalescing is not None:
        return _recorded(found, "reduce_scatter_single", op, (result, x), async_op, algorithm)  # type: ignore[no-any-return]
    steps = plan.choose("reduce_scatter", found.link, x, op, algorithm)
    return perform(  # type: ignore[no-any-return]
        name, found, async_op, (result,), steps, result, x, op, like=x, count=x.size, op=op
    )


reduce_scatter_tensor = reduce_scatter_single

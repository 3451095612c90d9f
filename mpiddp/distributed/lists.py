"""The collectives on lists with one array for each rank, blocking and asynchronous.

What they have in common, with each other and with those on one array, is said in `collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddp.algorithms import plan
from mpiddp.mpi.message import as_array, as_arrays, expect_like
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import again, perform, root_rank
from .groups import GroupLike, ProcessGroup, member


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
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If ``tensor_list`` is no list, or something is no array.
    ArrayError
        If an array cannot be sent as it is, or an output is not like its input.
    ValueError
        If the list has not one array for each rank.
    MismatchError
        If ranks give lists of other sizes or another dtype, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
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
    algorithm = plan.moving("all_gather_list", found.link, *outputs, x)
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
        The rank that gathers, as a global rank or as a rank of the group: not both.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If ``gather_list`` is no list, or something is no array.
    ArrayError
        If an array cannot be sent as it is, or an output is not like its input.
    ValueError
        If the list is missing on ``dst``, given elsewhere or has not one array for each rank; if the group has no
        such rank.
    MismatchError
        If ranks differ in dtype or root, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
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
    algorithm = plan.moving("gather", found.link, *(outputs or ()), x)
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
    """Copy ``scatter_list[r]`` of rank ``src`` into rank r's array (``torch.distributed.scatter``).

    Parameters
    ----------
    tensor : array
        The output; shapes may differ from rank to rank.
    scatter_list : list of arrays, optional
        The inputs, one for each rank, of that rank's shape; on rank ``src`` only, where it must be given.
    src, group_src : int, default 0
        The rank that sends, as a global rank or as a rank of the group: not both.
    group : ProcessGroup, optional
        The ranks that take part; all by default.
    async_op : bool, default False
        Return a `Work` at once, instead of waiting for the end.

    Returns
    -------
    Work or None
        The `Work` with ``async_op``; None otherwise, and on a rank that is not in the group.

    Raises
    ------
    TypeError
        If ``scatter_list`` is no list, or something is no array.
    ArrayError
        If an array cannot be sent as it is, or an output is not like its input.
    ValueError
        If the list is missing on ``src``, given elsewhere or has not one array for each rank; if the group has no
        such rank.
    MismatchError
        If ranks differ in dtype or root, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
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
    algorithm = plan.moving("scatter", found.link, x, *(inputs or ()))
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
    """Reduce ``input_list[r]`` over all ranks into rank r's ``output`` (``torch.distributed.reduce_scatter``).

    Parameters
    ----------
    output : array
        This rank's result; of equal shape and dtype on all ranks.
    input_list : list of arrays
        One for each rank, like ``output``.
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
        If ``input_list`` is no list, or something is no array; if there is no such reduction of the dtype.
    ArrayError
        If an array cannot be sent as it is, or an input is not like the output.
    ValueError
        If the list has not one array for each rank, or there is no such algorithm.
    MismatchError
        If ranks differ in size, dtype or reduction, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
    """
    found = member(group, "reduce_scatter")
    if found is None:
        return None
    result = as_array(output, "reduce_scatter", name="output")
    inputs = as_arrays(input_list, "reduce_scatter", found.link.size, writable=False, name="input_list")
    for index, given in enumerate(inputs):
        expect_like(given, result.shape, result.dtype, "reduce_scatter", f"input_list[{index}]")
    joined = np.concatenate([given.reshape(-1) for given in inputs])
    name = plan.called("reduce_scatter", algorithm)
    if again(name, found, async_op, result, joined, op):
        return None
    return perform(  # type: ignore[no-any-return]
        name,
        found,
        async_op,
        (result,),
        plan.choose("reduce_scatter", found.link, joined, op, algorithm),
        result,
        joined,
        op,
        like=result,
        count=result.size,
        op=op,
    )

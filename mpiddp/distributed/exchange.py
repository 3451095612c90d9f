"""All to all: every rank sends something else to each; in lists of arrays, or in one array cut into blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpiddp.algorithms import plan
from mpiddp.errors import ArrayError
from mpiddp.mpi.message import as_array, as_arrays, expect_like
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import perform
from .groups import GroupLike, member


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
        One for each rank, of the shape of what that rank sends; all of one dtype.
    input_tensor_list : list of arrays
        One for each rank; shapes may differ.
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
        If a list is none, or something is no array.
    ArrayError
        If an array cannot be sent as it is, or dtypes differ, or shapes where both are known.
    ValueError
        If a list has not one array for each rank.
    MismatchError
        If ranks differ in dtype, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
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
    algorithm = plan.moving("all_to_all", found.link, *outputs, *inputs)
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

    Follows ``torch.distributed.all_to_all_single``.

    Parameters
    ----------
    output : array
        What comes back, the block of rank r at r.
    input : array
        The blocks; of the dtype of ``output``, on all ranks.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows from and to each rank; equal blocks by default.
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
        If an argument is no array.
    ArrayError
        If an array cannot be sent as it is, dtypes differ, or this rank expects of itself what it does not send.
    ValueError
        If the sizes do not add up to the first dimension, or the ranks do not divide it.
    MismatchError
        If ranks differ in dtype, or call another operation.
    DistTimeoutError
        If a rank does not come within the group's timeout; a wait inside of MPI ends the job with this text.
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
    algorithm = plan.moving("all_to_all_single", found.link, result, x)
    return perform(  # type: ignore[no-any-return]
        "all_to_all_single", found, async_op, (result,), algorithm, result, x, received, sent, like=x
    )

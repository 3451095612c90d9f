"""Several collectives as one, by one buffer for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.device.packing import packed, unpack
from mpiddp.faults.calls import make_call
from mpiddp.mpi.future import Future
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_array, as_bytes, dtype_layout, expect_like
from mpiddp.mpi.reduction import ReduceOp, check
from mpiddp.mpi.requests import Steps
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import dispatch
from .groups import GroupLike, ProcessGroup, member


def _by_dtype(arrays: Sequence[Array]) -> list[list[int]]:
    indices: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        indices.setdefault(x.dtype, []).append(index)
    return list(indices.values())


def _all_reduce(link: Link, xs: Sequence[Array], op: ReduceOp) -> Steps:
    for indices in _by_dtype(xs):
        part = [xs[index] for index in indices]
        flat = packed(part)
        yield from planning.nested(link, "all_reduce", flat, flat, op)
        unpack(flat, part)
        link = link.after()


def _all_gather(link: Link, outputs: Sequence[Sequence[Array]], inputs: Sequence[Array]) -> Steps:
    joined = np.concatenate([as_bytes(x) for x in inputs])
    received = [np.empty_like(joined, shape=sum(x.nbytes for x in each)) for each in outputs]
    yield from planning.nested_gather(link, received, joined)
    for memory, arrays in zip(received, outputs, strict=True):
        unpack(memory, [as_bytes(x) for x in arrays])


def _arrays(given: object, name: str, operation: str, *, writable: bool) -> list[Array]:
    if not isinstance(given, list) or not given:
        raise TypeError(f"{operation} needs a non-empty list of arrays as `{name}`, got {given!r:.60}")
    return [as_array(x, operation, writable=writable, name=f"{name}[{index}]") for index, x in enumerate(given)]


def _dispatch(
    name: str,
    group: ProcessGroup,
    async_op: bool,
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    algorithm: Callable[..., Steps],
    args: tuple[Any, ...],
    op: ReduceOp | None = None,
) -> Work | None:
    """Dispatch an operation whose ``outputs`` are alike on all ranks."""
    layout = ",".join(f"{dtype_layout(x.dtype) or x.dtype.char}{x.size}" for x in outputs) if len(outputs) > 1 else ""
    call = make_call(group._link, name, inputs, outputs, op=op, count=sum(x.size for x in outputs), layout=layout)
    return dispatch(group, planning.plain(group._link, algorithm, call), args, outputs, async_op)


def _future(work: Work | None) -> Future | None:
    return None if work is None else work.get_future()


def all_reduce_coalesced(
    tensors: Sequence[ArrayLike], op: ReduceOp = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Future | None:
    """Reduce a list of arrays in place, by one all-reduce for each dtype.

    With ``async_op`` it returns a `Future` of the list, not a `Work`. ``tensors`` have the same sizes and dtypes on all
    ranks. `mpiddp.distributed` describes ``op``, ``group`` and the errors.

    Examples
    --------
    >>> x, y = np.ones(2), np.ones(1, np.int64)
    >>> dist.all_reduce_coalesced([x, y])
    >>> x.tolist(), y.tolist()
    ([2.0, 2.0], [2])
    """
    group = member(group, "all_reduce_coalesced")
    if group is None:
        return None
    xs = _arrays(tensors, "tensors", "all_reduce_coalesced", writable=True)
    for x in xs:
        check(x.dtype, op)
    return _future(_dispatch("all_reduce_coalesced", group, async_op, xs, xs, _all_reduce, (xs, op), op))


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[ArrayLike]],
    input_tensor_list: Sequence[ArrayLike],
    group: GroupLike = None,
    async_op: bool = False,
) -> Future | None:
    """Copy the arrays in every rank's list to all ranks.

    Element r of ``output_tensor_lists`` gets the arrays in rank r's ``input_tensor_list``, and has their shapes and
    dtypes. With ``async_op`` it returns a `Future` of all outputs. `mpiddp.distributed` describes ``group`` and the
    errors.

    Examples
    --------
    >>> x = [[np.empty(1)], [np.empty(1)]]
    >>> dist.all_gather_coalesced(x, [np.array([float(dist.get_rank())])])
    >>> x[0][0].item(), x[1][0].item()
    (0.0, 1.0)
    """
    name = "all_gather_coalesced"
    group = member(group, name)
    if group is None:
        return None
    inputs = _arrays(input_tensor_list, "input_tensor_list", name, writable=False)
    if not isinstance(output_tensor_lists, list):
        raise TypeError(f"{name} needs a list of lists as `output_tensor_lists`, got {output_tensor_lists!r:.60}")
    if len(output_tensor_lists) != group.size():
        raise ValueError(
            f"{name} needs one list in `output_tensor_lists` for each of {group.size()} ranks,"
            f" got {len(output_tensor_lists)}"
        )
    outputs = []
    for rank, given in enumerate(output_tensor_lists):
        where = f"output_tensor_lists[{rank}]"
        arrays = _arrays(given, where, name, writable=True)
        if len(arrays) != len(inputs):
            raise ValueError(f"{name} needs {len(inputs)} arrays in `{where}`, as in the inputs, got {len(arrays)}")
        for index, (x, output) in enumerate(zip(inputs, arrays, strict=True)):
            shape = x.shape if rank == group.rank() else None
            expect_like(output, shape, x.dtype, name, f"{where}[{index}]")
        outputs.append(arrays)
    flat = [x for arrays in outputs for x in arrays]
    return _future(_dispatch(name, group, async_op, flat, inputs, _all_gather, (outputs, inputs)))

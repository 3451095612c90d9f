"""An all-reduce of several arrays, by one buffer for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.algorithms import plan as planning
from mpiddp.device.packing import packed, unpack
from mpiddp.faults.calls import make_call
from mpiddp.mpi.future import Future
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_array, dtype_layout
from mpiddp.mpi.reduction import ReduceOp, check
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array, ArrayLike

from .dispatch import dispatch
from .groups import GroupLike, member


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
    name = "all_reduce_coalesced"
    group = member(group, name)
    if group is None:
        return None
    if not isinstance(tensors, list) or not tensors:
        raise TypeError(f"{name} needs a non-empty list of arrays as `tensors`, got {tensors!r:.60}")
    xs = [as_array(x, name, name=f"tensors[{index}]") for index, x in enumerate(tensors)]
    for x in xs:
        check(x.dtype, op)
    layout = ",".join(f"{dtype_layout(x.dtype) or x.dtype.char}{x.size}" for x in xs) if len(xs) > 1 else ""
    call = make_call(group._link, name, xs, xs, op=op, count=sum(x.size for x in xs), layout=layout)
    work = dispatch(group, planning.plain(group._link, _all_reduce, call), (xs, op), xs, async_op)
    return None if work is None else work.get_future()

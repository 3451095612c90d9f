"""Collectives from or to one rank: broadcast, reduce, gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.algorithms.local_reduce import finish, premultiply
from mpiddp.autograd import Function
from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, collectives
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.typing import Array

from .recorded import Several, contiguous, copied, empty_like, one_for_each, record, rows


class _Broadcast(Function):
    def forward(self, recorded: Array | None, x: Any, src: int, group: ProcessGroup) -> Array:
        self.src, self.group = src, group
        y = copied(x, "broadcast")
        collectives.broadcast(y, src, group)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = copied(grad, "reduce")
        collectives.reduce(y, self.src, ReduceOp.SUM, self.group)
        if self.group.rank() != self.group._group_rank(self.src):
            y[...] = 0
        return None, y


class _Reduce(Function):
    def forward(self, recorded: Array | None, x: Any, dst: int, op: ReduceOp, group: ProcessGroup) -> Array:
        self.dst, self.op, self.group = dst, op, group
        y = copied(x, "reduce")
        collectives.reduce(y, dst, op, group)
        if group.rank() != group._group_rank(dst):
            y[...] = 0
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = copied(grad, "broadcast")
        collectives.broadcast(y, self.dst, self.group)
        finish(self.op, y, self.group.size())
        premultiply(self.op, y)
        return None, y


class _Gather(Several):
    def run(self, outputs: list[Array], x: Any, dst: int, group: ProcessGroup) -> None:
        self.dst, self.group = dst, group
        x = contiguous(x, "gather")
        root = group.rank() == group._group_rank(dst)
        stacked = empty_like(x, group.size()) if root else array_namespace(x).zeros((group.size(), *x.shape), x.dtype)
        outputs += rows(stacked)
        collectives.gather(x, outputs if root else None, dst, group)

    def adjoint(self, grads: list[Array]) -> tuple[Array | None, ...]:
        y = empty_like(grads[0])
        root = self.group.rank() == self.group._group_rank(self.dst)
        given = [contiguous(grad, "scatter") for grad in grads] if root else None
        collectives.scatter(y, given, self.dst, self.group)
        return (y,)


class _Scatter(Function):
    def forward(self, recorded: Array | None, src: int, group: ProcessGroup, *inputs: Any) -> Array:
        self.src, self.group = src, group
        given = [contiguous(x, "scatter", f"tensors[{place}]") for place, x in enumerate(inputs)]
        self.shapes = [x.shape for x in given]
        y = empty_like(given[group.rank()])
        collectives.scatter(y, given if group.rank() == group._group_rank(src) else None, src, group)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        ys = [array_namespace(grad).zeros(shape, grad.dtype) for shape in self.shapes]
        root = self.group.rank() == self.group._group_rank(self.src)
        collectives.gather(contiguous(grad, "gather"), ys if root else None, self.src, self.group)
        return (None, None, None, *ys)


def broadcast(tensor: Any, src: int, group: GroupLike = None) -> Any:
    """Return the tensor of rank ``src``, on every rank; on others its values do not count.

    The gradient on rank ``src`` is the sum over all ranks; on others it is zero.
    """
    group = member(group, "broadcast")
    if group is None:
        return None
    return _Broadcast.apply(record(group, "broadcast", tensor), tensor, src, group)


def reduce(tensor: Any, dst: int, op: ReduceOp = ReduceOp.SUM, group: GroupLike = None) -> Any:
    """Return the reduction of all ranks' tensors on rank ``dst``; zeros elsewhere, where torch has partial sums.

    The gradient is that on rank ``dst``, times the factor of ``op`` (torch leaves that out).
    """
    group = member(group, "reduce")
    if group is None:
        return None
    return _Reduce.apply(record(group, "reduce", tensor, op=op), tensor, dst, op, group)


def gather(tensor: Any, dst: int = 0, group: GroupLike = None) -> Any:
    """Return the tuple of all ranks' tensors on rank ``dst``; zeros elsewhere."""
    group = member(group, "gather")
    if group is None:
        return None
    return _Gather.outputs(record(group, "gather", tensor), [], tensor, dst, group)


def scatter(tensors: Sequence[Any], src: int = 0, group: GroupLike = None) -> Any:
    """Return ``tensors[r]`` of rank ``src`` on rank r; on other ranks they do not count, and get zeros in backward."""
    group = member(group, "scatter")
    if group is None:
        return None
    inputs = one_for_each(tensors, group, "scatter", "tensors")
    return _Scatter.apply(record(group, "scatter", *inputs), src, group, *inputs)

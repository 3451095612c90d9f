"""Collectives in which all ranks are alike: all_reduce, all_gather, reduce_scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.algorithms.local_reduce import finish, premultiply
from mpiddp.autograd import Function
from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, collectives
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.mpi.message import as_array, as_arrays
from mpiddp.typing import Array, ArrayLike

from .recorded import Several, contiguous, copied, empty_like, one_for_each, record, rows


class _AllReduce(Function):
    def forward(self, recorded: Array | None, x: Any, op: ReduceOp, group: ProcessGroup) -> Array:
        self.op, self.group = op, group
        y = copied(x, "all_reduce")
        collectives.all_reduce(y, op, group)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = copied(grad, "all_reduce")
        collectives.all_reduce(y, ReduceOp.AVG if self.op is ReduceOp.AVG else ReduceOp.SUM, self.group)
        premultiply(self.op, y)
        return None, y


class _AllGather(Several):
    def run(self, outputs: list[Array], x: Any, group: ProcessGroup) -> None:
        self.group = group
        x = contiguous(x, "all_gather")
        stacked = empty_like(x, group.size())
        collectives.all_gather_single(stacked, x, group)
        outputs += rows(stacked)

    def adjoint(self, grads: list[Array]) -> tuple[Array | None, ...]:
        y = empty_like(grads[0])
        collectives.reduce_scatter_single(y, array_namespace(y).stack(grads), ReduceOp.SUM, self.group)
        return (y,)


class _ReduceScatter(Function):
    def forward(self, recorded: Array | None, output: Array, op: ReduceOp, group: ProcessGroup, *inputs: Any) -> Array:
        self.op, self.group = op, group
        given = [contiguous(x, "reduce_scatter", f"input_list[{place}]") for place, x in enumerate(inputs)]
        collectives.reduce_scatter(output, given, op, group)
        return output

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = empty_like(grad, self.group.size())
        collectives.all_gather_single(y, contiguous(grad, "all_gather"), self.group)
        finish(self.op, y, self.group.size())
        premultiply(self.op, y)
        return (None, None, None, None, *rows(y))


class _AllToAll(Several):
    def run(self, outputs: list[Array], group: ProcessGroup, *inputs: Any) -> None:
        self.group = group
        given = [contiguous(x, "all_to_all", f"input_tensor_list[{place}]") for place, x in enumerate(inputs)]
        self.given = [x.shape for x in given]
        collectives.all_to_all(outputs, given, group)

    def adjoint(self, grads: list[Array]) -> tuple[Array | None, ...]:
        ys = [array_namespace(grads[0]).empty(shape, grads[0].dtype) for shape in self.given]
        collectives.all_to_all(ys, [contiguous(grad, "all_to_all") for grad in grads], self.group)
        return (None, *ys)


class _AllToAllSingle(Function):
    def forward(
        self,
        recorded: Array | None,
        output: Array,
        x: Any,
        received: Sequence[int] | None,
        sent: Sequence[int] | None,
        group: ProcessGroup,
    ) -> Array:
        x = contiguous(x, "all_to_all_single", "input")
        self.shape, self.received, self.sent, self.group = x.shape, received, sent, group
        collectives.all_to_all_single(output, x, received, sent, group)
        return output

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = array_namespace(grad).empty(self.shape, grad.dtype)
        grad = contiguous(grad, "all_to_all_single")
        collectives.all_to_all_single(y, grad, self.sent, self.received, self.group)
        return None, None, y


def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: GroupLike = None) -> Any:
    """Return the reduction of all ranks' tensors, on every rank. The gradients are reduced in the same way."""
    group = member(group, "all_reduce")
    if group is None:
        return None
    return _AllReduce.apply(record(group, "all_reduce", tensor, op=op), tensor, op, group)


def all_gather(tensor: Any, group: GroupLike = None) -> Any:
    """Return the tuple of all ranks' tensors, on every rank; gradients are summed over the ranks."""
    group = member(group, "all_gather")
    if group is None:
        return None
    return _AllGather.outputs(record(group, "all_gather", tensor), [], tensor, group)


def reduce_scatter(
    output: ArrayLike, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, group: GroupLike = None
) -> Any:
    """Return the reduction of all ranks' ``input_list[r]`` on rank r, in the memory of ``output``.

    Gradients are multiplied with the factor of ``op`` (torch leaves that out).
    """
    group = member(group, "reduce_scatter")
    if group is None:
        return None
    result = as_array(output, "reduce_scatter", name="output")
    inputs = one_for_each(input_list, group, "reduce_scatter", "input_list")
    return _ReduceScatter.apply(record(group, "reduce_scatter", *inputs, op=op), result, op, group, *inputs)


def all_to_all(
    output_tensor_list: Sequence[ArrayLike], input_tensor_list: Sequence[Any], group: GroupLike = None
) -> Any:
    """Return output r of rank s: rank r's ``input_tensor_list[s]``, whose shapes may differ.

    Results lie in ``output_tensor_list``; gradients go the same way back.
    """
    group = member(group, "all_to_all")
    if group is None:
        return None
    outputs = as_arrays(output_tensor_list, "all_to_all", group.size(), name="output_tensor_list")
    inputs = one_for_each(input_tensor_list, group, "all_to_all", "input_tensor_list")
    return _AllToAll.outputs(record(group, "all_to_all", *inputs), outputs, group, *inputs)


def all_to_all_single(
    output: ArrayLike,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Any:
    """Cut a tensor into blocks along its first dimension, send block r to rank r, and join the incoming ones.

    Split sizes are rows from and to each rank, equal by default. Gradients go the same way back.
    """
    group = member(group, "all_to_all_single")
    if group is None:
        return None
    result = as_array(output, "all_to_all_single", name="output")
    recorded = record(group, "all_to_all_single", input)
    return _AllToAllSingle.apply(recorded, result, input, output_split_sizes or None, input_split_sizes or None, group)

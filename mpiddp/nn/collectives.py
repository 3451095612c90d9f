"""Collectives with gradients, as those of ``torch.distributed.nn.functional``, for tensors of mpiddp.

Backward is the adjoint collective: each rank's gradient is that of the sum of all ranks' losses. They share:

- A call is recorded on all ranks of the group if one rank's input requires a gradient (the ranks exchange one byte);
  all take part in backward, where torch waits for ever.
- Every rank calls ``backward`` on a result that depends on the output, ``0 * output.sum()`` if nothing else; the
  timeout names a missing rank.
- Recording is on for all ranks of a call or for none (`no_grad`), else RuntimeError on all of them.
- Inputs are tensors or arrays of any layout, of equal shape and dtype on all ranks except in all_to_all_single.
  Arrays to write to are C-contiguous, and share their memory with the returned tensor.
- ``group`` is all ranks by default; a rank outside of it is warned and gets None.
- ``op`` : SUM, AVG and PREMUL_SUM have a gradient; another raises ValueError where it is recorded.
- There are no second derivatives. Errors of the arguments are those of `mpiddp.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms.local_reduce import finish, premultiply
from mpiddp.autograd import Function, Tensor, is_grad_enabled
from mpiddp.device import array_namespace, is_device_array
from mpiddp.distributed import ReduceOp, collectives
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.errors import ArrayError
from mpiddp.mpi.message import as_array
from mpiddp.typing import Array, ArrayLike

_recording = Tensor(0.0, requires_grad=True)
"""First input of each recorded operation, so that it is recorded whatever the others require. It gets no gradient."""

_NEEDED, _UNRECORDED = 1, 2
_DIFFERENTIABLE = ("SUM", "AVG", "PREMUL_SUM")


def record(group: ProcessGroup, operation: str, *inputs: Any, op: ReduceOp = ReduceOp.SUM) -> Tensor | None:
    """Return the input that makes a call recorded, or None if no rank needs a gradient; collective."""
    needed = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    flags = np.array([_NEEDED * needed if is_grad_enabled() else _UNRECORDED], np.uint8)
    if group.size() > 1:
        collectives.all_reduce(flags, ReduceOp.BOR, group)
    if flags[0] == _NEEDED | _UNRECORDED:
        raise RuntimeError(
            f"{operation}: an input requires a gradient on one rank, and another rank does not record the call"
            " (no_grad): backward would wait for it; use no_grad on all ranks or on none, or pass tensor.detach()"
        )
    if flags[0] != _NEEDED:
        return None
    if isinstance(op, ReduceOp) and op.name not in _DIFFERENTIABLE:
        raise ValueError(f"{operation} has no gradient for {op}: reduce tensor.detach(), or take SUM or AVG")
    return _recording


def _is_strided(x: Any) -> bool:
    return (isinstance(x, np.ndarray) or is_device_array(x)) and not x.flags.c_contiguous


def contiguous(x: Any, operation: str, name: str = "tensor") -> Array:
    """Return an array in C order, a copy if need be."""
    if isinstance(x, np.generic):  # NumPy's arithmetic makes one of an array without dimensions
        x = np.asarray(x)
    return as_array(x.copy(order="C") if _is_strided(x) else x, operation, writable=False, name=name)


def copied(x: Any, operation: str) -> Array:
    found = contiguous(x, operation)
    return found if _is_strided(x) else found.copy()


def one_for_each(given: Any, group: ProcessGroup, operation: str, name: str) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"Expected parameter `{name}` of {operation} to be a list of tensors, got {type(given).__name__}"
        )
    if len(given) != group.size():
        raise ArrayError(
            f"{operation} needs one tensor in `{name}` for each of the {group.size()} ranks of the group, got"
            f" {len(given)}"
        )
    return list(given)


def empty_like(like: Array, *leading: int) -> Array:
    found: Array = array_namespace(like).empty((*leading, *like.shape), like.dtype)
    return found


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


class _AllGather(Function):
    def forward(self, recorded: Array | None, x: Any, group: ProcessGroup) -> Array:
        self.group = group
        x = contiguous(x, "all_gather")
        stacked = empty_like(x, group.size())
        collectives.all_gather_single(stacked, x, group)
        return stacked

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = empty_like(grad[0, ...])
        collectives.reduce_scatter_single(y, contiguous(grad, "reduce_scatter"), ReduceOp.SUM, self.group)
        return None, y


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
        return (None, None, None, None, *(y[rank, ...] for rank in range(len(y))))


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
    stacked = _AllGather.apply(record(group, "all_gather", tensor), tensor, group)
    return tuple(stacked[rank] for rank in range(group.size()))


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

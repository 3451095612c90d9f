"""Recording of a call on all ranks, arrays of its inputs, and operations with several outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor, is_grad_enabled
from mpiddp.device import array_namespace, is_device_array
from mpiddp.distributed import ReduceOp, collectives
from mpiddp.distributed.groups import ProcessGroup
from mpiddp.errors import ArrayError
from mpiddp.mpi.message import as_array
from mpiddp.typing import Array

_recording = Tensor(0.0, requires_grad=True)
"""First input of each recorded operation, so that it is recorded whatever the others require. It gets no gradient."""

NEEDED, _UNRECORDED = 1, 2
_DIFFERENTIABLE = ("SUM", "AVG", "PREMUL_SUM")


def own_flags(inputs: Sequence[Any]) -> int:
    """Return whether, on this rank, an input needs a gradient, and whether nothing is recorded."""
    if not is_grad_enabled():
        return _UNRECORDED
    return NEEDED if any(isinstance(x, Tensor) and x.requires_grad for x in inputs) else 0


def recording(flags: int, operation: str) -> Tensor | None:
    """Return the input that makes a call recorded, or None if no rank needs a gradient; takes all ranks' flags."""
    if flags == NEEDED | _UNRECORDED:
        raise RuntimeError(
            f"{operation}: an input requires a gradient on one rank, and another rank does not record the call"
            " (no_grad): backward would wait for it; use no_grad on all ranks or on none, or pass tensor.detach()"
        )
    return _recording if flags == NEEDED else None


def record(group: ProcessGroup, operation: str, *inputs: Any, op: ReduceOp = ReduceOp.SUM) -> Tensor | None:
    flags = np.array([own_flags(inputs)], np.uint8)
    if group.size() > 1:
        collectives.all_reduce(flags, ReduceOp.BOR, group)
    found = recording(int(flags[0]), operation)
    if found is not None and isinstance(op, ReduceOp) and op.name not in _DIFFERENTIABLE:
        raise ValueError(f"{operation} has no gradient for {op}: reduce tensor.detach(), or take SUM or AVG")
    return found


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


def rows(stacked: Array) -> list[Array]:
    """Return views of the rows, also of a flat array, whose elements are no arrays."""
    return [stacked[row, ...] for row in range(len(stacked))]


class _Output(Function):
    """An output of `Several`; hands its gradient to the operation's node, whose own output is an empty token."""

    def forward(self, token: Array, output: Array, operation: Several, place: int) -> Array:
        self.token, self.operation, self.place = token, operation, place
        return output

    def backward(self, grad: Array) -> Array:
        self.operation.arrived[self.place] = grad
        return self.token


class Several(Function):
    """An operation with several outputs: `run` fills them, `adjoint` gets their gradients, zeros for unused ones.

    Each output has a node of its own on the tape, which backward runs before this operation's node.
    """

    arrived: dict[int, Array]

    @classmethod
    def outputs(cls, recorded: Tensor | None, outputs: list[Array], *args: Any) -> tuple[Tensor, ...]:
        """Run the operation and return its outputs, which it may replace."""
        token = cls.apply(recorded, outputs, *args)
        if token.grad_fn is None:
            return tuple(Tensor(output) for output in outputs)
        return tuple(_Output.apply(token, output, token.grad_fn, place) for place, output in enumerate(outputs))

    def forward(self, recorded: Array | None, outputs: list[Array], *args: Any) -> Array:
        self.run(outputs, *args)
        self.shapes = [output.shape for output in outputs]
        self.arrived = {}
        token: Array = array_namespace(outputs[0]).empty(0, outputs[0].dtype)
        return token

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp = array_namespace(grad)
        grads = [
            self.arrived[place] if place in self.arrived else xp.zeros(shape, grad.dtype)
            for place, shape in enumerate(self.shapes)
        ]
        self.arrived = {}
        return (None, None, *self.adjoint(grads))

    def run(self, outputs: list[Array], *args: Any) -> None:
        raise NotImplementedError

    def adjoint(self, grads: list[Array]) -> tuple[Array | None, ...]:
        """Return the gradients of the arguments of `run` after the outputs."""
        raise NotImplementedError

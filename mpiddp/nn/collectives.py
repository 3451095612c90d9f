"""Collectives with gradients, as those of ``torch.distributed.nn.functional``, for tensors of mpiddp.

Backward is the adjoint collective: each rank's gradient is that of the sum of all ranks' losses. For all of these
collectives:

- If the input of one rank requires a gradient, the call is recorded on all ranks of the group; the ranks exchange one
  byte to find out. Then all ranks take part in backward. In torch only ranks with such an input do, and wait for ever.
- Every rank must call ``backward`` on a result that depends on the output, if only on ``0 * output.sum()``. The timeout
  error names a rank that does not.
- If one rank's input requires a gradient and another rank is under `no_grad`, all ranks raise RuntimeError.
- Inputs are tensors or arrays of any layout, of equal shape and dtype on all ranks.
- ``group`` is all ranks by default. A rank outside of the group gets a warning and None.
- ``op`` : SUM, AVG and PREMUL_SUM have a gradient. Another operation raises ValueError if the call is recorded.
- There are no second derivatives. Errors of the arguments are those of `mpiddp.distributed`.
"""

from typing import Any

import numpy as np

from mpiddp.algorithms.local_reduce import premultiply
from mpiddp.autograd import Function, Tensor, is_grad_enabled
from mpiddp.device import array_namespace
from mpiddp.distributed import ReduceOp, collectives
from mpiddp.distributed.coalescing import contiguous
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.typing import Array

_recording = Tensor(0.0, requires_grad=True)
"""First input of each recorded operation; it gets no gradient.

It requires one, so the tape records the operation also on a rank where no other input does.
"""

_NEEDED, _UNRECORDED = 1, 2
_DIFFERENTIABLE = ("SUM", "AVG", "PREMUL_SUM")


def record(group: ProcessGroup, operation: str, *inputs: Any, op: ReduceOp = ReduceOp.SUM) -> Tensor | None:
    """Return the first input of a call: `_recording` if any rank needs a gradient, else None.

    It is collective: the ranks of the group exchange one byte.
    """
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


class _AllReduce(Function):
    def forward(self, recorded: Array | None, x: Any, op: ReduceOp, group: ProcessGroup) -> Array:
        self.op, self.group = op, group
        y = contiguous(x, "all_reduce").copy()
        collectives.all_reduce(y, op, group)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = contiguous(grad, "all_reduce").copy()
        collectives.all_reduce(y, ReduceOp.AVG if self.op is ReduceOp.AVG else ReduceOp.SUM, self.group)
        premultiply(self.op, y)
        return None, y


class _AllGather(Function):
    def forward(self, recorded: Array | None, x: Any, group: ProcessGroup) -> Array:
        self.group = group
        x = contiguous(x, "all_gather")
        stacked: Array = array_namespace(x).empty((group.size(), *x.shape), x.dtype)
        collectives.all_gather_single(stacked, x, group)
        return stacked

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y: Array = array_namespace(grad).empty(grad.shape[1:], grad.dtype)
        collectives.reduce_scatter_single(y, contiguous(grad, "reduce_scatter"), ReduceOp.SUM, self.group)
        return None, y


def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: GroupLike = None) -> Any:
    """Return the reduction of all ranks' tensors, on every rank.

    Backward averages the gradients over the ranks for AVG, and sums them for SUM and PREMUL_SUM. For PREMUL_SUM each
    rank then multiplies the sum by its own factor.
    """
    group = member(group, "all_reduce")
    if group is None:
        return None
    return _AllReduce.apply(record(group, "all_reduce", tensor, op=op), tensor, op, group)


def all_gather(tensor: Any, group: GroupLike = None) -> Any:
    """Return the tuple of all ranks' tensors, on every rank. Backward sums the gradients over the ranks."""
    group = member(group, "all_gather")
    if group is None:
        return None
    stacked = _AllGather.apply(record(group, "all_gather", tensor), tensor, group)
    return tuple(stacked[rank] for rank in range(group.size()))

"""Messages from rank to rank: send and recv."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.autograd import Function
from mpiddp.device import array_namespace
from mpiddp.distributed import p2p
from mpiddp.distributed.groups import GroupLike, ProcessGroup, member
from mpiddp.errors import ArrayError
from mpiddp.mpi.message import as_array
from mpiddp.typing import Array, ArrayLike

from .recorded import NEEDED, contiguous, own_flags, recording


class _Send(Function):
    def forward(self, recorded: Array | None, x: Any, dst: int, group: ProcessGroup, tag: int) -> Array:
        x = contiguous(x, "send")
        self.shape, self.dst, self.group, self.tag = x.shape, dst, group, tag
        p2p.send(np.array([recorded is not None, x.size]), dst, group, tag)
        p2p.send(x, dst, group, tag)
        zero: Array = array_namespace(x).zeros((), x.dtype)
        return zero

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        y = array_namespace(grad).empty(self.shape, grad.dtype)
        p2p.recv(y, self.dst, self.group, self.tag)
        return None, y


class _Recv(Function):
    def forward(self, recorded: Array | None, output: Array, src: int, group: ProcessGroup, tag: int) -> Array:
        self.src, self.group, self.tag = src, group, tag
        return output

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        p2p.send(contiguous(grad, "send"), self.src, self.group, self.tag)
        return (None,)


def send(tensor: Any, dst: int, group: GroupLike = None, tag: int = 0) -> Any:
    """Send a tensor to a rank that calls `recv`, and get its gradient from there in backward; not in torch.

    Add the result, a zero without dimensions, to the loss, so that backward waits here for the gradient. Backward waits
    for messages in the reverse order of forward: blocking calls that work forward work backward.

    Examples
    --------
    >>> if rank == 0:  # doctest: +SKIP
    ...     loss = nn.functional.send(hidden, dst=1)
    ... else:
    ...     loss = criterion(nn.functional.recv(np.empty((8, 16), np.float32), src=0), target)
    >>> loss.backward()  # doctest: +SKIP
    """
    group = member(group, "send")
    if group is None:
        return None
    return _Send.apply(recording(own_flags((tensor,)) & NEEDED, "send"), tensor, dst, group, tag)


def recv(tensor: ArrayLike, src: int | None = None, group: GroupLike = None, tag: int = 0) -> Any:
    """Receive a tensor from a rank that calls `send`, by default any, and send its gradient back in backward.

    The result lies in the memory of ``tensor``, which has the message's size and dtype. It requires a gradient if the
    sender's does, which raises RuntimeError where this rank does not record the call (no_grad).
    """
    group = member(group, "recv")
    if group is None:
        return None
    output = as_array(tensor, "recv")
    header = np.empty(2, np.int64)
    sender = p2p.recv(header, src, group, tag)
    p2p.recv(output, sender, group, tag)
    needed, size = header.tolist()
    if size != output.size:
        raise ArrayError(f"recv: rank {sender} sends {size} elements, `tensor` has shape {output.shape}")
    recorded = recording(needed | own_flags(()), "recv")
    return _Recv.apply(recorded, output, sender, group, tag)

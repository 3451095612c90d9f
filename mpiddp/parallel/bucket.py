"""Gradient buckets: arrays in which gradients are born and which are sent as they are.

All buckets of a dtype are slices of one array, and the parameters' own arrays are laid out alike in another: nothing is
packed or unpacked, and an optimizer may step over a whole model in a few operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.half import assign
from mpiddp.distributed import ProcessGroup, symmetric_empty
from mpiddp.optim.flat import address
from mpiddp.typing import Array


class Handle(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Take the hook back."""


class ParameterLike(Protocol):
    """A trained parameter: `mpiddp.nn.Parameter`, or that of another library with the same attributes."""

    data: Array
    grad: Array | None
    grad_slot: Array | None
    requires_grad: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], object]) -> Handle:
        """Call ``hook(parameter)`` in each backward once ``grad`` is final."""


class GradBucket:
    """Some parameters, their gradients in one array, and how far the reduction is (``torch.distributed.GradBucket``).

    Parameters
    ----------
    index : int
        Its place among the buckets.
    parameters : sequence of Parameter
        The parameters, in the order of memory.
    buffer : array
        One-dimensional; exactly as long as the gradients.
    is_last : bool
        Whether no bucket follows.
    """

    def __init__(self, index: int, parameters: Sequence[ParameterLike], buffer: Array, is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._buffer = buffer
        self._is_last = is_last
        self._slots = _views(buffer, parameters)
        self.pending = len(self._parameters)
        """Parameters whose gradients this backward has not made yet."""

    def index(self) -> int:
        """Return the bucket's place in the order of reduction."""
        return self._index

    def buffer(self) -> Array:
        """Return the one-dimensional array that holds all gradients of the bucket; not divided by anything yet."""
        return self._buffer

    def gradients(self) -> list[Array]:
        """Return the gradients, views of the buffer."""
        return list(self._slots)

    def parameters(self) -> list[ParameterLike]:
        """Return the parameters."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Tell whether this bucket is the last of the backward."""
        return self._is_last

    def set_buffer(self, buffer: Array) -> None:
        """Copy ``buffer``, of the bucket's length, into the bucket's, unless it is that memory already."""
        if address(buffer) != address(self._buffer) or buffer.dtype != self._buffer.dtype:
            assign(self._buffer, buffer.reshape(-1))


def _views(flat: Array, parameters: Sequence[ParameterLike]) -> list[Array]:
    """Cut ``flat`` into one array for each parameter, of its shape."""
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.data.size].reshape(parameter.shape))
        start += parameter.data.size
    return views


def lay_out(buckets: Sequence[Sequence[ParameterLike]], group: ProcessGroup) -> list[GradBucket]:
    """Make the buckets: move the parameters' arrays side by side, and give each a place for its gradient.

    Gradients that exist move too. Collective over the group: the gradients' memory is shared by the ranks of a node.

    Parameters
    ----------
    buckets : sequence of sequences of Parameter
        The plan: the same on all ranks; dtypes never share a bucket.
    group : ProcessGroup
        Who reduces them.
    """
    made: dict[int, GradBucket] = {}
    for dtype in dict.fromkeys(bucket[0].dtype for bucket in buckets):
        chosen = [(index, bucket) for index, bucket in enumerate(buckets) if bucket[0].dtype == dtype]
        together = [parameter for _, bucket in chosen for parameter in bucket]
        length = sum(parameter.data.size for parameter in together)
        xp = array_namespace(together[0].data)
        _move_together(together, xp.empty(length, dtype=dtype))
        gradients, start = _gradient_memory(together[0].data, length, group), 0
        for index, bucket in chosen:
            size = sum(math.prod(parameter.shape) for parameter in bucket)
            buffer = gradients[start : start + size]
            made[index] = GradBucket(index, bucket, buffer, is_last=index == len(buckets) - 1)
            start += size
    ordered = [made[index] for index in range(len(buckets))]
    for grad_bucket in ordered:
        for parameter, slot in zip(grad_bucket.parameters(), grad_bucket.gradients(), strict=True):
            if parameter.grad is not None:
                slot[...] = parameter.grad
                parameter.grad = slot
            parameter.grad_slot = slot
    return ordered


def _move_together(parameters: Sequence[ParameterLike], flat: Array) -> None:
    for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
        view[...] = parameter.data
        parameter.data = view


def _gradient_memory(like: Array, length: int, group: ProcessGroup) -> Array:
    """Return memory for gradients where ``like`` is, which the ranks of the node share."""
    shared = symmetric_empty(length, like.dtype, group, "cuda" if is_device_array(like) else "cpu")
    assert shared is not None, "the reducer is a member of its group"
    return shared

"""Gradient buckets: arrays into which backward writes gradients. They are sent as they are, without packing.

All buckets of a dtype are slices of one array. The parameters lie in another array, in the same order. Therefore an
optimizer can update a whole model in a few operations.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpiddp.device import array_namespace, empty, is_device_array
from mpiddp.device.half import assign
from mpiddp.device.packing import views
from mpiddp.distributed import ProcessGroup, broadcast, symmetric_empty
from mpiddp.optim.flat import Parameter, address
from mpiddp.typing import Array

MIB = 1 << 20
DEFAULT_CAP_BYTES = 25 * MIB
LAST_CAP_BYTES = 1 * MIB
"""The cap of the last bucket. It is small, because no computation overlaps with the communication of that bucket. torch
makes the first bucket small instead."""

LEAST_BYTES = MIB // 4
"""A first bucket that is smaller than this joins the second bucket. In a perceptron with layers of 784, 256, 256 and 10
units, such a first bucket cost more time than its overlap saved."""


class ParameterLike(Parameter, Protocol):
    grad_slot: Array | None
    requires_grad: bool

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], object]) -> Any:
        """Call ``hook(parameter)`` in each backward, as soon as ``grad`` is final."""


class GradBucket:
    """Parameters, in their order in memory, and their gradients in one array (``torch.distributed.GradBucket``)."""

    def __init__(self, index: int, parameters: Sequence[ParameterLike], buffer: Array, is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._buffer = buffer
        self._is_last = is_last
        self._slots = list(views(buffer, (parameter.shape for parameter in parameters)))
        self.pending = len(self._parameters)
        """The number of parameters that have no gradient yet in the running backward."""

    def index(self) -> int:
        """Return the bucket's position in the order in which buckets are reduced."""
        return self._index

    def buffer(self) -> Array:
        """Return the bucket's gradients as one flat array, not divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[Array]:
        """Return the parameters' gradients, which are views of the buffer."""
        return list(self._slots)

    def parameters(self) -> list[ParameterLike]:
        """Return the parameters whose gradients are in this bucket."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return True if this bucket is the last one that a backward reduces."""
        return self._is_last

    def set_buffer(self, buffer: Array) -> None:
        """Copy ``buffer``, of the same length, into the bucket's array, unless both are the same memory."""
        if address(buffer) != address(self._buffer) or buffer.dtype != self._buffer.dtype:
            assign(self._buffer, buffer.reshape(-1))


def _size(parameters: Sequence[ParameterLike]) -> int:
    return sum(parameter.data.size for parameter in parameters)


def lay_out(buckets: Sequence[Sequence[ParameterLike]], group: ProcessGroup) -> list[GradBucket]:
    """Move the parameters of each dtype side by side into one array, and their gradients into another.

    Gradients on the host lie in memory that the ranks of the node share. All ranks call this together.
    """
    made: dict[int, GradBucket] = {}
    for dtype in dict.fromkeys(bucket[0].dtype for bucket in buckets):
        chosen = {index: bucket for index, bucket in enumerate(buckets) if bucket[0].dtype == dtype}
        together = [parameter for bucket in chosen.values() for parameter in bucket]
        like, length = together[0].data, _size(together)
        values = array_namespace(like).empty(length, dtype=dtype)
        for parameter, view in zip(together, views(values, [each.shape for each in together]), strict=True):
            view[...] = parameter.data
            parameter.data = view
        gradients = empty((length,), dtype) if is_device_array(like) else symmetric_empty(length, dtype, group)
        assert gradients is not None, "the reducer is a member of its group"
        parts = views(gradients, [(_size(bucket),) for bucket in chosen.values()])
        for (index, bucket), part in zip(chosen.items(), parts, strict=True):
            made[index] = GradBucket(index, bucket, part, is_last=index == len(buckets) - 1)
            for parameter, slot in zip(bucket, made[index].gradients(), strict=True):
                if parameter.grad is not None:
                    slot[...] = parameter.grad
                    parameter.grad = slot
                parameter.grad_slot = slot
    return [made[index] for index in range(len(buckets))]


def _fill(order: Sequence[int], sizes_bytes: Sequence[int], caps_bytes: Sequence[int]) -> list[list[int]]:
    """Cut ``order``, which holds numbers of parameters, into buckets. A bucket ends when its size reaches its cap."""
    buckets: list[list[int]] = []
    filled, cap = 0, 0
    for index in order:
        if filled >= cap:
            cap = caps_bytes[min(len(buckets), len(caps_bytes) - 1)]
            filled = 0
            buckets.append([])
        buckets[-1].append(index)
        filled += sizes_bytes[index]
    return buckets


def assign_to_buckets(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    caps_bytes: Sequence[int] | None = None,
) -> list[list[int]]:
    """Assign parameters to buckets, in the ``order`` in which their gradients are expected.

    Parameters of different kinds share no bucket.

    ``caps_bytes`` are the caps of the first, second, ... bucket of each kind; the last cap holds for all later buckets,
    too. By default the cap of the last bucket of each kind is 1 MiB, that of the others is 25 MiB, and a first bucket
    below 256 KiB joins the second.

    >>> assign_to_buckets([3, 2, 1, 0], [4, 4, 4, 4], "aaaa", caps_bytes=[8])
    [[3, 2], [1, 0]]
    """
    buckets: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        mine = [index for index in order if kinds[index] == kind]
        if caps_bytes is not None:
            buckets += _fill(mine, sizes_bytes, caps_bytes)
        else:
            from_behind = _fill(mine[::-1], sizes_bytes, [LAST_CAP_BYTES, DEFAULT_CAP_BYTES])
            if len(from_behind) > 1 and sum(sizes_bytes[index] for index in from_behind[-1]) < LEAST_BYTES:
                from_behind[-2:] = [from_behind[-2] + from_behind[-1]]
            buckets += [bucket[::-1] for bucket in from_behind[::-1]]
    place = {index: position for position, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


def caps_in_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> list[int] | None:
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError("give bucket_cap_mb or bucket_cap_mb_list, not both")
    caps = [bucket_cap_mb] if bucket_cap_mb is not None else bucket_cap_mb_list
    if caps is None:
        return None
    if not caps or min(caps) <= 0:
        raise ValueError(f"bucket caps must be positive numbers of MiB, got {list(caps)}")
    return [int(cap * MIB) for cap in caps]


class Slot(NamedTuple):
    bucket: GradBucket
    gradient: Array


class Buckets:
    """The buckets of a model, in the order in which they are sent.

    All ranks make the buckets, and change their order, together. Parameters are numbered in the order of registration,
    which is the same on all ranks. ``order`` has these numbers in the order in which gradients are expected. It is the
    reverse order of registration at first, and final once ``settled`` is True.
    """

    def __init__(
        self, parameters: Sequence[ParameterLike], group: ProcessGroup, caps_bytes: Sequence[int] | None = None
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._caps_bytes = caps_bytes
        self.settled = False
        self._build(list(reversed(range(len(parameters)))))

    def install_order(self, order: Sequence[int]) -> None:
        if sorted(order) != list(range(len(self._parameters))):
            raise ValueError(
                f"the order of buckets has to name each of {len(self._parameters)} trained parameters once, got"
                f" {len(order)} numbers: it is that of another model, or of one with other parameters frozen"
            )
        self._rebuild(list(order))
        self.settled = True

    def settle(self, order_here: Sequence[int] | None = None) -> None:
        """Make an order final: the first rank's ``order_here``, or the expected ``order`` if that is None."""
        if order_here is not None:
            agreed = np.array(order_here, dtype=np.int64)
            broadcast(agreed, group=self._group, group_src=0)
            self._rebuild(agreed.tolist())
        self.settled = True

    def _rebuild(self, order: list[int]) -> None:
        if list(map(set, self._assign(order))) != list(map(set, self._assign(self.order))):
            self._build(order)

    def _build(self, order: list[int]) -> None:
        chosen = self._assign(order)
        self.order = order
        self.in_order = lay_out([[self._parameters[index] for index in members] for members in chosen], self._group)
        self.slots = {
            index: Slot(bucket, gradient)
            for members, bucket in zip(chosen, self.in_order, strict=True)
            for index, gradient in zip(members, bucket.gradients(), strict=True)
        }

    def _assign(self, order: list[int]) -> list[list[int]]:
        sizes = [parameter.data.nbytes for parameter in self._parameters]
        kinds = [parameter.dtype for parameter in self._parameters]
        return assign_to_buckets(order, sizes, kinds, self._caps_bytes)

    def sizes_bytes(self) -> list[int]:
        return [bucket.buffer().nbytes for bucket in self.in_order]

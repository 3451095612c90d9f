"""Communication hooks, as torch's ``ddp_comm_hooks``: other ways to average a bucket than one all-reduce.

A hook takes its state and a `GradBucket`, and returns a `Future`, or a `Work` that has one. The value of the future is
the array of the averages, or a list that begins with this array.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.device.half import bfloat16, converted
from mpiddp.distributed import Future, Work, all_reduce
from mpiddp.distributed.groups import GroupLike, ProcessGroup, known
from mpiddp.typing import Array

from .buckets import GradBucket

CommHook = Callable[[Any, GradBucket], Any]


def call(hook: CommHook, state: object, bucket: GradBucket) -> Future:
    """Call a hook, and return its `Future`; RuntimeError if the hook returns neither a `Work` nor a `Future`."""
    outcome = hook(state, bucket)
    if isinstance(outcome, Work):
        return outcome.get_future()
    if not isinstance(outcome, Future):
        raise RuntimeError(
            f"DDP communication hook's callback must return a Work or a Future object, but got {kind_of(outcome)}"
        )
    return outcome


def averages(value: Any, bucket: GradBucket) -> Array:
    """Return the array of averages from the value of a hook's future.

    RuntimeError if there is no array, or if its length is not the bucket's.
    """
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    length = bucket.buffer().size
    found: Any = getattr(value, "__mpiddp_array__", value)
    is_array = hasattr(found, "dtype")
    if not is_array or found.size != length:
        size = f" of {found.size} elements" if is_array else ""
        raise RuntimeError(
            f"a communication hook's future must hold an array of {length} elements (the gradients of bucket"
            f" {bucket.index()}) or a list that begins with one, got {kind_of(value)}{size}"
        )
    return found  # type: ignore[no-any-return]


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def submitted(x: Array, group: ProcessGroup) -> Future:
    """Begin to sum ``x`` over the ranks, in place; return a `Future` of ``x``."""
    work = all_reduce(x, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def completed(value: Array) -> Future:
    future = Future()
    future.set_result(value)
    return future


def allreduce_hook(process_group: GroupLike, bucket: GradBucket) -> Future:
    """Average a bucket: divide its buffer by the number of ranks, as torch's hook does, and sum it over the ranks.

    >>> ddp.register_comm_hook(None, dist.allreduce_hook)  # doctest: +SKIP
    """
    group = known(process_group)
    buffer = bucket.buffer()
    buffer /= buffer.dtype.type(group.size())
    return submitted(buffer, group)


def noop_hook(state: object, bucket: GradBucket) -> Future:
    """Leave the gradients as they are. Use it to measure a step without communication."""
    return completed(bucket.buffer())


def _compress_hook(dtype: np.dtype[Any], process_group: GroupLike, bucket: GradBucket) -> Future:
    group = known(process_group)
    buffer = bucket.buffer()
    if buffer.dtype.kind != "f" or buffer.dtype.itemsize <= dtype.itemsize:  # no float wider than ``dtype``
        return allreduce_hook(group, bucket)
    # Gradients are divided before they are rounded, because a sum of divided ones overflows less often. The reducer
    # converts the result back to the bucket's dtype when it copies the result into the bucket.
    return submitted(converted(buffer * buffer.dtype.type(1 / group.size()), dtype), group)


def fp16_compress_hook(process_group: GroupLike, bucket: GradBucket) -> Future:
    """Average a bucket in float16, which sends half the bytes of float32. It is faster on slow networks only.

    float16 has 11 significant bits and values up to 65,504. Gradients are divided by the number of ranks, rounded,
    summed in float32, and rounded once more.
    """
    return _compress_hook(np.dtype(np.float16), process_group, bucket)


def bf16_compress_hook(process_group: GroupLike, bucket: GradBucket) -> Future:
    """Average a bucket in bfloat16, which sends half the bytes of float32. It needs the package ``ml_dtypes``.

    bfloat16 has 8 significant bits and the range of float32.
    """
    return _compress_hook(bfloat16(), process_group, bucket)

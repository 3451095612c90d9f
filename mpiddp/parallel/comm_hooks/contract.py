"""What a communication hook is, and what it owes: a future of a bucket's averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiddp.distributed import Future, Work
from mpiddp.parallel.bucket import GradBucket
from mpiddp.typing import Array

CommHook = Callable[[Any, GradBucket], Any]
"""``hook(state, bucket)`` returns a `Work` or a `Future` of an array or list of arrays."""


def call(hook: CommHook, state: object, bucket: GradBucket) -> Future:
    """Let ``hook`` reduce a bucket.

    Raises
    ------
    RuntimeError
        If it returns something else than a `Work` or a `Future`.
    """
    outcome = hook(state, bucket)
    if isinstance(outcome, Work):
        return outcome.get_future()
    if not isinstance(outcome, Future):
        raise RuntimeError(
            f"DDP communication hook's callback must return a Work or a Future object, but got {_kind(outcome)}"
        )
    return outcome


def averages(value: Any, bucket: GradBucket) -> Array:
    """Return the gradients that a hook's future holds: one array, or the first of a list.

    Raises
    ------
    RuntimeError
        If that is no array, or one of another length than the bucket's.
    """
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    length = bucket.buffer().size
    found: Array | None = getattr(value, "__mpiddp_array__", value)
    if getattr(found, "size", None) != length or not hasattr(found, "dtype"):
        size = f" of {found.size} elements" if found is not None and hasattr(found, "dtype") else ""
        raise RuntimeError(
            f"a communication hook's future must hold an array of {length} elements (the gradients of bucket"
            f" {bucket.index()}) or a list that begins with one, got {_kind(value)}{size}"
        )
    assert found is not None
    return found


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

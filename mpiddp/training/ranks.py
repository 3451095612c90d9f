"""What the ranks of a run tell each other: values, errors, and arrays."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

import mpiddp.distributed as dist
from mpiddp.distributed.groups import default_group
from mpiddp.typing import Array

from .options import UsageError

_T = TypeVar("_T")


def gathered(value: _T) -> list[_T]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_any_rank(text: str | None) -> str | None:
    """Return the first rank's text that is not None."""
    return next((each for each in gathered(text) if each is not None), None)


def broadcasted(value: _T, src: int) -> _T:
    told = [value]
    dist.broadcast_object_list(told, src=src)
    return told[0]


def raise_on_all_ranks(action: Callable[[], _T], error_class: type[UsageError] = UsageError) -> _T:
    """Run an action that may fail on some ranks; UsageError of the first failure on all."""
    fault, result = None, None
    try:
        result = action()
    except (OSError, ValueError, ImportError, UsageError) as error:
        fault = str(error)
    # With a timeout ranks poll; without, waits for a download would keep cores busy inside MPI.
    dist.barrier(timeout=default_group()._link.timeout_s)
    for rank, text in enumerate(gathered(fault)):
        if text is not None:
            raise error_class(f"{text} (on rank {rank})" if rank else text)
    return result  # type: ignore[return-value]


def arrays_from(
    rank: int, arrays: Mapping[str, Array], wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Array]]:
    """Yield a rank's arrays on every rank that wants them, broadcast one at a time to save memory."""
    layouts = broadcasted({name: (x.shape, x.dtype.str) for name, x in arrays.items()}, rank)
    for name, (shape, dtype) in layouts.items():
        x = arrays[name].copy() if dist.get_rank() == rank else np.empty(shape, dtype)
        dist.broadcast(x, src=rank)
        if wanted(name):
            yield name, x

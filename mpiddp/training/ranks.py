"""Exchange values, errors and arrays between the ranks of a run. All ranks call each function together."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import mpiddp.distributed as dist
from mpiddp.distributed.groups import default_group
from mpiddp.serialization import flatten, unflatten
from mpiddp.typing import Array

from .options import UsageError

_T = TypeVar("_T")


def gathered(value: _T) -> list[_T]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_any_rank(text: str | None) -> str | None:
    """Return the text of the lowest rank whose text is not None; None if all are."""
    return next((each for each in gathered(text) if each is not None), None)


def broadcasted(value: _T, src: int) -> _T:
    told = [value]
    dist.broadcast_object_list(told, src=src)
    return told[0]


def raise_on_all_ranks(action: Callable[[], _T], error_class: type[UsageError] = UsageError) -> _T:
    """Run an action that may fail on some ranks. If it fails, all ranks raise the lowest failing rank's error.

    The error that they raise is an ``error_class`` with the text of the original one. The action may fail with OSError,
    ValueError, ImportError or UsageError; an error of another class is raised on its own rank only.
    """
    fault, result = None, None
    try:
        result = action()
    except (OSError, ValueError, ImportError, UsageError) as error:
        fault = str(error)
    # One rank may download data for minutes. In a barrier with a timeout the other ranks poll and sleep meanwhile. A
    # plain barrier may block inside MPI, as it does between nodes, and would keep their cores busy.
    dist.barrier(timeout=default_group()._link.timeout_s)
    for rank, text in enumerate(gathered(fault)):
        if text is not None:
            raise error_class(f"{text} (on rank {rank})" if rank else text)
    return result  # type: ignore[return-value]


def state_from(rank: int, state: Any) -> Any:
    """Return a rank's nested state on every rank. Its arrays are broadcast one at a time to save memory."""
    tree, arrays = flatten(state)
    tree, layouts = broadcasted((tree, {name: (x.shape, x.dtype.str) for name, x in arrays.items()}), rank)
    received: dict[str, Array] = {}
    for name, (shape, dtype) in layouts.items():
        received[name] = arrays[name].copy() if dist.get_rank() == rank else np.empty(shape, dtype)
        dist.broadcast(received[name], src=rank)
    return unflatten(tree, received)

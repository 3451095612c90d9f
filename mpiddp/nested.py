"""Nested containers of arrays: dicts, lists, tuples and named tuples."""

import copy
from collections.abc import Callable, Sequence
from typing import Any


def children(value: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return the values in a container, and a function that makes a container of the same kind of new values.

    The result for a leaf is None. The value None itself is a container without values. The values of a dict come in the
    order of its sorted keys, which is the same on all ranks, whatever the order of insertion.
    """
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))

        def same_dict(new: Sequence[Any]) -> Any:
            made = copy.copy(value)  # it has the class of the dict, and its order
            made.update(zip(keys, new, strict=True))
            return made

        return [value[key] for key in keys], same_dict
    if isinstance(value, (list, tuple)):
        kind = type(value)
        return value, lambda new: kind(*new) if hasattr(kind, "_fields") else kind(new)
    return ((), lambda new: None) if value is None else None


def leaves(value: Any) -> list[Any]:
    found = children(value)
    return [value] if found is None else [leaf for each in found[0] for leaf in leaves(each)]


def map_nested(function: Callable[[Any], Any], value: Any, kind: type = object) -> Any:
    found = children(value)
    if found is not None:
        return found[1]([map_nested(function, each, kind) for each in found[0]])
    return function(value) if isinstance(value, kind) else value

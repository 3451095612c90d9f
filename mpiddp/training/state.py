"""State of any kind as a checkpoint takes it: arrays apart from what JSON knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from mpiddp.device import is_device_array
from mpiddp.typing import Array

_ARRAY, _PAIRS = "__array__", "__pairs__"
"""Keys of what stands for an array, and for a dict whose keys are not strings."""


class Stateful(Protocol):
    """What has a state that decides how training goes on: a schedule, a loss scale, a communication hook's memory."""

    def state_dict(self) -> Any:
        """Return the state: numbers, strings, None and arrays, in dicts and lists."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from such a state; tuples have become lists."""


def take_apart(state: Any, name: str) -> tuple[Any, dict[str, Array]]:
    """Separate a state into what JSON knows and arrays.

    Parameters
    ----------
    state : Any
        Numbers, strings, None and arrays, in dicts, lists and tuples.
    name : str
        What the names of arrays begin with.

    Returns
    -------
    tree : Any
        The state with names in the places of arrays.
    arrays : dict of str to ndarray
        The arrays themselves, by these names.

    Raises
    ------
    TypeError
        If there is something else in it; the text says where.

    Examples
    --------
    >>> tree, arrays = take_apart({"iter": 3, "error": {0: np.zeros(2)}}, "hook")
    >>> arrays
    {'hook.error.0': array([0., 0.])}
    >>> put_together(tree, arrays)
    {'iter': 3, 'error': {0: array([0., 0.])}}
    """
    arrays: dict[str, Array] = {}

    def visit(value: Any, at: str) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case list() | tuple():
                return [visit(each, f"{at}.{place}") for place, each in enumerate(value)]
            case Mapping() if all(isinstance(key, str) for key in value):
                return {key: visit(each, f"{at}.{key}") for key, each in value.items()}
            case Mapping():
                return {_PAIRS: [[visit(key, at), visit(each, f"{at}.{key}")] for key, each in value.items()]}
            case _ if isinstance(value, np.ndarray) or is_device_array(value):
                arrays[at] = value
                return {_ARRAY: at}
        raise TypeError(f"{at} is a {type(value).__name__}: a checkpoint takes numbers, strings, None and arrays")

    return visit(state, name), arrays


def put_together(tree: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the state that `take_apart` has separated; arrays are those given, not copies."""
    match tree:
        case {"__array__": name}:
            return arrays[name]
        case {"__pairs__": pairs}:
            return {key: put_together(value, arrays) for key, value in pairs}
        case dict():
            return {key: put_together(value, arrays) for key, value in tree.items()}
        case list():
            return [put_together(value, arrays) for value in tree]
    return tree

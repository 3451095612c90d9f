"""Callbacks that can be taken off again. Imports nothing of mpiddp."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Hooks = dict[int, Callable[..., Any]]
"""Hooks in the order of their registration, by an id that is never used twice."""

_ids = itertools.count()


class RemovableHandle:
    """What registering a hook returns; usable as a context manager that removes the hook at its end."""

    def __init__(self, hooks: Hooks, hook: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._id = next(_ids)
        hooks[self._id] = hook

    def remove(self) -> None:
        """Take the hook off; doing it twice does no harm."""
        self._hooks.pop(self._id, None)

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

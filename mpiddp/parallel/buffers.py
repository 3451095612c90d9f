"""Buffers of a wrapped model, such as running statistics: the first rank's for all, or what a hook makes of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from mpiddp.distributed import ProcessGroup
from mpiddp.typing import Array

from .replicas import broadcast_arrays
from .selection import Selection

BufferHook = Callable[[Any, dict[str, Array]], Any]


class BufferCommHookLocation(Enum):
    """When a hook on buffers runs (torch's ``_BufferCommHookLocation``)."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferSync:
    """Makes a module's buffers the same on all ranks.

    Parameters
    ----------
    selection : Selection
        Whose buffers.
    group : ProcessGroup
        The ranks.
    """

    def __init__(self, selection: Selection, group: ProcessGroup) -> None:
        self._selection, self._group = selection, group
        self._hook: tuple[object, BufferHook, BufferCommHookLocation] | None = None
        self._backwards = 0

    @property
    def has_hook(self) -> bool:
        """Whether a hook has taken the place of the broadcast."""
        return self._hook is not None

    def register_hook(self, state: object, hook: BufferHook, location: BufferCommHookLocation) -> None:
        """Let ``hook(state, named_buffers)`` do it.

        Raises
        ------
        TypeError
            If it cannot be called.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        self._hook = state, hook, location

    def is_due(self, backwards: int) -> bool:
        """Tell whether a backward has been reduced, of ``backwards`` in all, since the buffers were synchronised."""
        return backwards != self._backwards

    def broadcast(self, source: int, backwards: int) -> None:
        """Make the buffers those of ``source``, a rank of the group, after so many reduced backward passes."""
        broadcast_arrays(list(self._selection.buffers().values()), self._group, source)
        self._backwards = backwards

    def sync(self, source: int, backwards: int, now: BufferCommHookLocation) -> None:
        """Make the buffers those of ``source``, or what the hook makes them, if it is time.

        The broadcast comes before forward, a hook where it was registered for.
        """
        if self._hook is None:
            if now is BufferCommHookLocation.PRE_FORWARD:
                self.broadcast(source, backwards)
            return
        state, hook, when = self._hook
        if when is now:
            for work in hook(state, self._selection.buffers()) or ():
                work.wait()
            self._backwards = backwards

"""Buffers of a wrapped model, such as running statistics: the first rank's for all, or what a hook makes of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from mpiddp.distributed import ProcessGroup
from mpiddp.nn import Module
from mpiddp.typing import Array

from .replicas import broadcast_arrays

BufferHook = Callable[[Any, dict[str, Array]], Any]


class BufferCommHookLocation(Enum):
    """When a hook on buffers runs (torch's ``_BufferCommHookLocation``)."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferSync:
    """Makes a module's buffers the same on all ranks.

    Parameters
    ----------
    module : Module
        Whose buffers; looked up each time, because they may be replaced.
    ignored : set of str
        Names of those to leave alone.
    group : ProcessGroup
        The ranks.
    """

    def __init__(self, module: Module, ignored: frozenset[str], group: ProcessGroup) -> None:
        self._module, self._ignored, self._group = module, ignored, group
        self._hook: tuple[object, BufferHook, BufferCommHookLocation] | None = None

    @property
    def has_hook(self) -> bool:
        """Whether a hook has taken the place of the broadcast."""
        return self._hook is not None

    def named(self) -> dict[str, Array]:
        """Return the buffers by their names."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def arrays(self) -> list[Array]:
        """Return the buffers."""
        return list(self.named().values())

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

    def sync(self, source: int, now: BufferCommHookLocation) -> bool:
        """Make the buffers those of ``source``, a rank of the group, or what the hook makes them, if it is time.

        Returns
        -------
        bool
            Whether it was: the broadcast comes before forward, a hook where it was registered for.
        """
        if self._hook is None:
            if now is not BufferCommHookLocation.PRE_FORWARD:
                return False
            broadcast_arrays(self.arrays(), self._group, source)
            return True
        state, hook, when = self._hook
        if when is not now:
            return False
        for work in hook(state, self.named()) or ():
            work.wait()
        return True

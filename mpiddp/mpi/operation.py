"""What this process is waiting in, for those who watch over it: the watchdog, its peers, the exit of the program.

A wait costs two assignments here and no look at a clock: the watchdog sees that the same wait is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .link import Link


class Operation(NamedTuple):
    """An operation of a group, as one names it to a person."""

    name: str
    link: Link
    array: Any = None
    peers: Sequence[int] | None = None
    """World ranks that it waits for; None: all of the group."""
    limited: bool = False
    """Whether the waiter looks at the clock itself and raises when the time is up."""
    number: int = 0
    """Which one it is: of the group's collectives, or of this rank's messages in the group."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this operation from every other one, and keeps nothing of it alive."""
        return self.name, self.link.id, self.peers is None, self.number

    def __str__(self) -> str:
        """Return e.g. ``all_reduce #3 of float32 (10, 2) in the group of ranks 0, 1, 2``."""
        number = f" #{self.number}" if self.peers is None else ""
        shape = f" of {self.array.dtype} {self.array.shape}" if hasattr(self.array, "dtype") else ""
        return f"{self.name}{number}{shape} in {self.link}"


running: Operation | None = None
"""The operation that this process is waiting in now."""

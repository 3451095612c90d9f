"""Operations by name and ranks, and those in which this process waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mpiddp.errors import MismatchError

_LISTED = 16


class Monitor(Protocol):
    """Implemented by `mpiddp.faults`."""

    @property
    def survivable(self) -> bool:
        """Ranks survive the failure of one: waits poll, as one in MPI would never end."""

    def check(self) -> None: ...

    def disagreement(self) -> MismatchError | None: ...

    def unheard(self) -> MismatchError | None: ...

    def explain(self, operation: Operation) -> str:
        """Describe the ranks that keep an operation from ending."""

    def unmatched(self) -> str: ...

    def translate(self, error: BaseException) -> None:
        """Raise `RankFailedError` if a failed rank is the cause."""


class Members:
    """A group's world ranks, number (equal on all) and terms of waits."""

    __slots__ = ("monitor", "number", "ranks", "timeout_s", "world_size")

    def __init__(
        self, number: int, ranks: tuple[int, ...], world_size: int, timeout_s: float, monitor: Monitor
    ) -> None:
        self.number, self.ranks, self.world_size = number, ranks, world_size
        self.timeout_s, self.monitor = timeout_s, monitor

    def __str__(self) -> str:
        if self.ranks == tuple(range(self.world_size)):
            return f"the group of all {len(self.ranks)} ranks"
        if len(self.ranks) <= _LISTED:
            return f"the group of ranks {', '.join(map(str, self.ranks))}"
        return f"the group of {len(self.ranks)} ranks {', '.join(map(str, self.ranks[:3]))}, ..., {self.ranks[-1]}"


class Operation(NamedTuple):
    name: str
    members: Members
    array: Any = None
    peers: Sequence[int] | None = None
    """World ranks; None: all of the group."""
    limited: bool = False
    """The waiter watches the clock."""
    number: int = 0
    """Among the group's collectives, or this rank's messages in it."""
    tag: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that keeps no array alive."""
        return self.name, self.members.number, self.peers is None, self.number

    def __str__(self) -> str:
        """Return e.g. ``all_reduce #3 of float32 (10, 2) in the group of ranks 0, 1, 2``."""
        number = f" #{self.number}" if self.peers is None and self.number else ""
        shape = f" of {self.array.dtype} {self.array.shape}" if hasattr(self.array, "dtype") else ""
        peer = ""
        if self.tag is not None and self.peers is not None:
            who = f"rank {self.peers[0]}" if len(self.peers) == 1 else "any rank"
            peer = f" {'to' if self.sends else 'from'} {who} with tag {self.tag}"
        return f"{self.name}{number}{shape}{peer} in {self.members}"

    @property
    def sends(self) -> bool:
        return self.name in ("send", "isend")


new_operation = tuple.__new__
"""Half the time of ``Operation(...)``; takes all fields."""

waiting: dict[int, Operation] = {}
"""By thread: two stores and no clock, as the watchdog recognises an unchanged wait."""

"""Operations by name and ranks, and those in which this process waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mpiddp.errors import MismatchError

_LISTED = 16
"""Of a larger group a text gives the first, the last and the number."""


class Monitor(Protocol):
    """The watch over a group's operations, implemented by `mpiddp.faults`."""

    @property
    def survivable(self) -> bool:
        """True if ranks survive the failure of one; then every wait polls, as one in MPI would never end."""

    def check(self) -> None:
        """Raise if a rank has failed, or ranks call different operations."""

    def disagreement(self) -> MismatchError | None:
        """Return the error of ranks that call different operations, or None."""

    def explain(self, operation: Operation) -> str:
        """Ask and describe the ranks that keep an operation from ending."""

    def unmatched(self) -> str:
        """Describe arrived messages without a receive."""

    def translate(self, error: BaseException) -> None:
        """Raise `RankFailedError` if a failed rank is the cause."""


class Members:
    """The world ranks of a group, its number, equal on all ranks, and the terms of its waits."""

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
    """An operation of a group."""

    name: str
    members: Members
    array: Any = None
    peers: Sequence[int] | None = None
    """World ranks awaited; None: all of the group."""
    limited: bool = False
    """True if the waiter watches the clock."""
    number: int = 0
    """Among the group's collectives, or this rank's messages in the group."""
    tag: int | None = None
    """None: no message."""

    @property
    def identity(self) -> tuple[object, ...]:
        """A key of this operation that keeps no array alive."""
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
        """True for a message that is sent."""
        return self.name in ("send", "isend")


new_operation = tuple.__new__
"""``new_operation(Operation, (...))``, with all fields, takes half the time of ``Operation(...)``."""

waiting: dict[int, Operation] = {}
"""The operation in which each thread waits: two stores and no clock, as the watchdog recognises an unchanged wait."""

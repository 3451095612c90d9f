"""Calls, operations, and the waits of this process.

A `Call` says what the ranks of a group do together. An `Operation` is a call that this rank has begun: the flight
recorder, the watchdog and the errors know it by its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(slots=True, eq=False)
class Call:
    """All of a call but the values in its arrays; equal calls share one, which their plan holds."""

    members: Members
    operation: str
    dtype: Any = None
    input_shape: tuple[int, ...] | None = None
    """Of several arrays, their elements; None where unknown, as of objects."""
    output_shape: tuple[int, ...] | None = None
    peers: Sequence[int] | None = None
    """World ranks; None: all of the group."""
    tag: int | None = None
    """Of a message."""
    algorithm: str | None = None
    """That the program has asked for."""
    note: str = ""
    """Says whose call it is, instead of the operation: "DDP bucket 3"."""
    record: Any = None
    """What the ranks compare, with its reduction and root (`mpiddp.faults.calls.Record`); None: nothing."""

    @property
    def name(self) -> str:
        """The name in errors and logs, such as "all_reduce by ring"."""
        return self.note or label(self.operation, self.algorithm)


def label(operation: str, algorithm: str | None) -> str:
    return operation if algorithm is None else f"{operation} by {algorithm}"


class Operation:
    """A call that this rank has begun.

    Times are of `time.monotonic`; ``end`` is 0 before it, and after an error.
    """

    __slots__ = ("call", "code", "end", "limited", "number", "offset", "start")

    def __init__(
        self,
        call: Call,
        number: int = 0,
        code: Any = None,
        offset: int = 0,
        start: float = 0.0,
        end: float = 0.0,
    ) -> None:
        self.call = call
        self.number = number
        """Among the group's collectives, or this rank's messages in it."""
        self.code = code
        """Python's, of the program; with ``offset``, its line."""
        self.offset = offset
        self.start = start
        self.end = end
        self.limited = False
        """The waiter watches the clock."""

    def as_limited(self) -> Operation:
        """Return the operation as one whose waiter watches the clock, as the watchdog would end the job."""
        found = Operation(self.call, self.number)
        found.limited = True
        return found

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def members(self) -> Members:
        return self.call.members

    @property
    def peers(self) -> Sequence[int] | None:
        return self.call.peers

    @property
    def tag(self) -> int | None:
        return self.call.tag

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that keeps no array alive."""
        return self.name, self.members.number, self.peers is None, self.number

    def __str__(self) -> str:
        """Return e.g. ``all_reduce #3 of float32 (10, 2) in the group of ranks 0, 1, 2``."""
        number = f" #{self.number}" if self.peers is None and self.number else ""
        shape = "" if self.call.output_shape is None else f" of {self.call.dtype} {self.call.output_shape}"
        peer = ""
        if self.tag is not None and self.peers is not None:
            who = f"rank {self.peers[0]}" if len(self.peers) == 1 else "any rank"
            peer = f" {'to' if self.sends else 'from'} {who} with tag {self.tag}"
        return f"{self.name}{number}{shape}{peer} in {self.members}"

    @property
    def sends(self) -> bool:
        return self.name in ("send", "isend")


waiting: dict[int, Operation] = {}
"""By thread: two stores and no clock, as the watchdog recognises an unchanged wait."""

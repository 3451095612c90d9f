"""Calls, operations, and the waits of this process.

A `Call` says what the ranks of a group do together. An `Operation` is a call that this rank has begun: the flight
recorder, the watchdog and the errors know it by its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from mpiddp.errors import DistError, DistTimeoutError

_LISTED = 16


class Monitor(Protocol):
    """The interface by which a group learns of the faults of its ranks. `mpiddp.faults` implements it."""

    polls: bool
    """True if every wait has to poll, so that an error of another rank can end it. That is so if ranks survive the
    death of another one, and if errors are raised on all ranks instead of ending the program (``on_error="raise"``)."""

    def watch(self, link: Any) -> None:
        """Take note of the group's link, which calls this before it makes communicators."""

    def check(self) -> None: ...

    def disagreement(self) -> DistError | None: ...

    def unheard(self) -> DistError | None: ...

    def explain(self, operation: "Operation") -> str:
        """Return a text about the ranks that keep an operation from ending."""

    def unmatched(self) -> str: ...

    def be_told(self, error: DistError) -> None:
        """Let the next call or wait of the group raise ``error``. Any thread may call this method."""

    def find(self, error: DistError) -> None:
        """Let the next call or wait raise ``error``, on all ranks of the group."""

    def timed_out(self, error: DistTimeoutError) -> None:
        """Take note that a wait has lasted for the group's limit."""

    def translate(self, error: BaseException) -> None:
        """Raise `RankFailedError` if a failed rank is the cause of ``error``; otherwise do nothing."""


@dataclass(slots=True, eq=False, repr=False)
class Members:
    """A group as its operations know it: ranks in the world, a number that is equal on all ranks, the timeout."""

    number: int
    ranks: tuple[int, ...]
    world_size: int
    timeout_s: float
    monitor: Monitor
    outer: tuple[int, ...] = ()
    """The ranks' numbers in MPI's world, if the job numbers them otherwise."""
    queue: Any = None
    """The group's pending operations."""
    name: str = ""
    description: str = ""
    """The program's description of the group. ``name`` is the program's name for it."""

    def __str__(self) -> str:
        outer = f" ({_listed(self.outer)} of the world)" if self.outer else ""
        if self.ranks == tuple(range(self.world_size)):
            return f"the group of all {len(self.ranks)} ranks{outer}"
        count = f"{len(self.ranks)} " if len(self.ranks) > _LISTED else ""
        return f"the group of {count}ranks {_listed(self.ranks)}{outer}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _LISTED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}"


@dataclass(slots=True, eq=False)
class Call:
    """The properties of a call, without its arrays. A plan or a route holds it, so that repeated calls share it."""

    members: Members
    operation: str
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    """The shape of the result, or the number of elements of several arrays together; None if it is not known, as for
    Python objects."""
    peers: Sequence[int] | None = None
    """The other ranks, by their numbers in the world; None for a call of the whole group."""
    tag: int | None = None
    """The tag of a message."""
    algorithm: str | None = None
    """The algorithm that the program has asked for, if any."""
    note: str = ""
    """A name that says more than the operation, and is shown instead of it: "DDP bucket 3"."""
    record: Any = None
    """The record that the ranks compare (`mpiddp.faults.calls.Record`); None if they do not compare this call."""

    @property
    def name(self) -> str:
        """The call's name in errors and logs, such as "all_reduce by ring"."""
        return self.note or label(self.operation, self.algorithm)

    @property
    def sends(self) -> bool:
        return self.operation in ("send", "isend")


def label(operation: str, algorithm: str | None) -> str:
    return operation if algorithm is None else f"{operation} by {algorithm}"


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """A call that this rank has begun.

    Times are those of `time.monotonic`. ``end`` is 0 until the operation has ended, and stays 0 if it ends in an error.
    """

    call: Call
    number: int = 0
    """The operation's number among the group's collectives, or among this rank's messages in the group."""
    code: Any = None
    """The Python code of the program that made the call; ``offset`` in it tells the line."""
    offset: int = 0
    start: float = 0.0
    end: float = 0.0
    limited: bool = False
    """True if the thread that waits checks the time limit itself. The watchdog then leaves the limit to it."""

    def as_limited(self) -> "Operation":
        """Return the operation with `limited` set. Its wait counts from now on.

        Without this the watchdog would end the job when the group's limit is over.
        """
        return self if self.limited else Operation(self.call, self.number, start=monotonic(), limited=True)

    @property
    def members(self) -> Members:
        return self.call.members

    @property
    def peers(self) -> Sequence[int] | None:
        return self.call.peers

    @property
    def identity(self) -> tuple[object, ...]:
        """A key for this operation, which keeps no array alive."""
        return self.call.name, self.members.number, self.peers is None, self.number

    def __str__(self) -> str:
        """Return e.g. ``all_reduce #3 of float32 (10, 2) in the group of ranks 0, 1, 2``."""
        return f"{self.text()} in {self.members}"

    def text(self) -> str:
        """Return the operation without its group."""
        number = f" #{self.number}" if self.peers is None and self.number else ""
        shape = "" if self.call.shape is None else f" of {self.call.dtype} {self.call.shape}"
        peer = ""
        if self.call.tag is not None and self.peers is not None:
            who = f"rank {self.peers[0]}" if len(self.peers) == 1 else "any rank"
            peer = f" {'to' if self.call.sends else 'from'} {who} with tag {self.call.tag}"
        return f"{self.call.name}{number}{shape}{peer}"


waiting: "dict[int, Operation]" = {}
"""The operation that each thread waits for, by the thread's identifier."""

"""Slots: memory of a node through which the ranks of a group show each other short arrays, without a message.

Every rank has a few slots, used in turns. In each turn it writes an array, if it has one to show, and then a record:
the number of the turn, and what it calls as which of the group's operations. Whoever waits for that record may read the
array. All ranks take part in every turn, one after the other, and begin one when they are done with the one before. So
a slot may be written again when all ranks have come to the turn after its last one; and ranks that call different
things in a turn find out in their wait.

Python has no fences. A record is seen after the array because processors of the x86 family show a thread's stores to
others in the program's order [1]_; there are no slots elsewhere.

References
----------
.. [1] P. Sewell et al., "x86-TSO: a rigorous and usable programmer's model for x86 multiprocessors", Communications of
   the ACM 53 (7), 2010.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiddp.faults.calls import Call
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

SLOT_BYTES = 1 << 16
"""The longest array that a slot takes; longer ones go in pieces, and ranks wait for each other in every one."""
_DEPTH = 4
"""Slots of each rank: by less than so many turns the root of broadcasts may be ahead of the others."""
_RECORD = struct.Struct("<qqQqq")
_NUMBERS, _CALL = struct.Struct("<qq"), struct.Struct("<Qqq")
_pack_numbers = _NUMBERS.pack
_MOST_KNOWN = 256
REGION_BYTES = mmap.PAGESIZE + _DEPTH * SLOT_BYTES
"""What slots take for each rank, the records included."""

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether this processor shows stores in the program's order."""

# The others are near, mostly. Who has looked this often gives its core away after each look, and at last sleeps.
_LOOKS_AT_ONCE = 40
_LOOKS_BEFORE_SLEEP = 20_000
_SLEEP_S = 50e-6
# What was sent to ranks that need it in order to come here moves only inside of MPI.
_LOOKS_PER_PROGRESS = 16
# Counted in seconds, since on a busy machine a look may take milliseconds.
_CHECK_S = 1e-3


class Turn(NamedTuple):
    """Where everything of a turn is, for arrays of one shape and dtype."""

    records: slice
    """The ranks' records in the memory."""
    own_record: slice
    table: Array
    """The ranks' arrays: shape (ranks, ...)."""
    rows: list[Array]
    """The same by rank."""
    own: Array
    """This rank's."""


class Until:
    """What a step waits for: that ranks have come to this turn, or are done with an old one.

    Parameters
    ----------
    happened : callable
        Tells whether they have.
    slots : Slots
        Whose ranks they are.
    """

    __slots__ = ("_happened", "_looks", "_slots")

    def __init__(self, happened: Callable[[], bool], slots: Slots) -> None:
        self._happened, self._slots, self._looks = happened, slots, 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Tell whether it has happened, and help MPI on."""
        if self._happened():
            return True
        self._looks += 1
        if self._looks % _LOOKS_PER_PROGRESS == 0:
            self._slots.comm.Iprobe()
        return False

    def Wait(self) -> None:  # noqa: N802 - MPI's name
        """Block until it has happened."""
        happened = self._happened
        if happened():
            return
        for _ in range(_LOOKS_AT_ONCE):
            if self._slots.crowded:
                os.sched_yield()
            if happened():
                return
        self._slots.linger()
        self._looks, checked_s = 0, time.monotonic()
        while not self.Test():
            if time.monotonic() - checked_s > _CHECK_S:
                self._slots.check()
                checked_s = time.monotonic()
            if self._looks > _LOOKS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)
            else:
                os.sched_yield()


class Slots:
    """The slots of a group on one node.

    Parameters
    ----------
    memory : mmap
        Shared by the ranks.
    start : int
        Where in it `REGION_BYTES` for each rank begin.
    rank, size : int
        This process's place among the ranks, and their number.
    comm : MPI.Intracomm
        A communicator, through which MPI is helped on in a wait.
    linger, check : callable
        Called when a wait turns out to be long, and from time to time while it goes on; raise if it will never end.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        start: int,
        rank: int,
        size: int,
        comm: MPI.Intracomm,
        linger: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._memory, self._start = memory, start
        self._rank, self._size = rank, size
        self.comm, self.linger, self.check = comm, linger, check
        self._number = self._complete = 0
        """The turn that was begun last, and the last one to which all ranks are known to have come."""
        self._records = slice(0, 0)
        self._record = self._expected = b""
        self._numbers = [
            memoryview(memory)[self._records_of(turn)].cast("q")[:: _RECORD.size // 8] for turn in range(_DEPTH)
        ]
        """Where the ranks' records have the numbers of turns."""
        self.crowded = size > (os.cpu_count() or 1)
        """Whether the others may need this rank's core in order to come."""
        self.free = Until(self._is_free, self)
        """That the next turn may begin."""
        self.everybody = Until(self._all_came, self)
        """That all ranks have come to this turn."""
        self.known: dict[Any, Any] = {}
        """What users of the slots have found out about calls; it goes with them."""

    def _records_of(self, number: int) -> slice:
        start = self._start + number % _DEPTH * self._size * _RECORD.size
        return slice(start, start + self._size * _RECORD.size)

    def _is_free(self) -> bool:
        oldest = self._number + 2 - _DEPTH
        if oldest <= self._complete:
            return True
        for turn in range(self._number, oldest - 1, -1):  # mostly they are not far behind, and then it is known longer
            if min(self._numbers[turn % _DEPTH]) >= turn:  # who is ahead may have used the place again
                self._complete = turn
                return True
        return False

    def _all_came(self) -> bool:
        if self._memory[self._records] != self._expected:
            return False
        self._complete = self._number
        return True

    def came(self, rank: int) -> Until:
        """Return what waits for one rank to come to this turn."""
        first = rank * _RECORD.size

        def it_came() -> bool:
            start = self._records.start + first
            return self._memory[start : start + _RECORD.size] == self._record

        return Until(it_came, self)

    def disagreement(self) -> tuple[Call, int, Call] | None:
        """Return this rank's call, and a rank and its call, if it has made another one in the same turn."""
        if self._odd() is not None:
            time.sleep(_SLEEP_S)  # a record that was being written is whole then
            return self._odd()
        return None

    def _odd(self) -> tuple[Call, int, Call] | None:
        # Who is ahead and does not wait for the others finds out about an old turn.
        for turn in range(self._number, max(self._number - _DEPTH, 0), -1):
            records = list(_RECORD.iter_unpack(self._memory[self._records_of(turn)]))
            mine = records[self._rank]
            for rank, record in enumerate(records):
                if record[0] == mine[0] == turn and record != mine:
                    return Call(*mine[1:]), rank, Call(*record[1:])
        return None

    def turns(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Turn]:
        """Return where everything of each turn is, for arrays of a shape and dtype."""
        strides = (SLOT_BYTES, *np.empty(shape, dtype).strides)
        found = []
        for number in range(_DEPTH):
            start = self._start + self._size * (mmap.PAGESIZE + number * SLOT_BYTES)
            table: Array = np.ndarray((self._size, *shape), dtype, self._memory, start, strides)
            records = self._records_of(number)
            own = records.start + self._rank * _RECORD.size
            rows = [table[rank, ...] for rank in range(self._size)]
            found.append(Turn(records, slice(own, own + _RECORD.size), table, rows, rows[self._rank]))
        return found

    def begin(
        self, turns: list[Turn], sequence: int, call: bytes, x: Array | None, change: Callable[[Array], None] | None
    ) -> Turn:
        """Begin the next turn, when `free` has happened.

        Parameters
        ----------
        turns : list of Turn
            From `turns`, for arrays like ``x``.
        sequence : int
            The number of the group's operation whose turn it is: equal on all ranks, or one has left another turn out.
        call : bytes
            What is called, from `packed`: equal on all ranks.
        x : array, optional
            What this rank shows.
        change : callable, optional
            What is done with the copy of ``x`` before the others may see it.
        """
        number = self._number + 1
        if number - self._complete > _DEPTH - 1:
            self.free.Wait()  # steps have done so
        self._number = number
        turn = turns[number % _DEPTH]
        if x is not None:
            turn.own[...] = x
            if change is not None:
                change(turn.own)
        record = _pack_numbers(number, sequence) + call
        self._memory[turn.own_record] = record
        self._records, self._record, self._expected = turn.records, record, record * self._size
        return turn

    def remember(self, key: object, found: object) -> None:
        """Put something into `known`, which does not grow without end."""
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[key] = found

    def close(self) -> None:
        """Give the memory back, at once and not when somebody collects garbage."""
        self.known.clear()
        del self._memory, self._numbers


def packed(kind: int, count: int, root: int) -> bytes:
    """Return a call as it is recorded; see `board` for what it consists of."""
    return _CALL.pack(kind, count, root)

"""Eager buffers: short arrays of a node's ranks, exchanged without a message.

Every rank has a few buffers, used in rounds. In each round it writes its array, if any, and then a record: its call,
and last the number of the round. A peer that sees the number may read the array. All ranks take part in every round: a
buffer is free once all have arrived in the next one.

Python has no fences. x86 shows a thread's stores to others in program order [1]_; other processors get no eager
buffers. A record's number is erased before the record is overwritten.

References
----------
.. [1] P. Sewell et al., "x86-TSO: a rigorous and usable programmer's model for x86 multiprocessors", CACM 53 (7), 2010.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiddp import settings
from mpiddp.cores import available_cores
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.typing import Array

BUFFER_BYTES = 1 << 16
"""Longer arrays go in pieces."""
MAX_RANKS = 8
"""In larger groups each rank would read too many arrays."""
_BUFFERS = 4
"""Of each rank: the root of broadcasts is ahead by fewer rounds."""
_RECORD = struct.Struct("<qqQqq")
"""Round; sequence, kind, count, root."""
_NUMBER_BYTES = 8
REGION_BYTES = mmap.PAGESIZE + _BUFFERS * BUFFER_BYTES

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""The processor shows stores in the program's order."""

# The others are mostly near: look, then yield the core after each look, at last sleep.
_LOOKS = 40
_LOOKS_BEFORE_SLEEP = 20_000
_SLEEP_S = 50e-6
# Messages that other ranks need to arrive move only inside of MPI.
_LOOKS_PER_PROGRESS = 16
# A look may take milliseconds on a busy machine.
_CHECK_S = 1e-3


def region_bytes(link: Link) -> int:
    """Return each rank's bytes; 0: no eager buffers."""
    usable = link.one_node and 1 < link.size <= MAX_RANKS and ORDERED and settings.eager()
    return REGION_BYTES if usable else 0


class Round(NamedTuple):
    records: slice
    own_call: slice
    own_number: int
    """Among the memory's 8-byte words."""
    table: Array
    """Shape (ranks, ...)."""
    rows: list[Array]
    own: Array


class SpinWait:
    """An event in shared memory, with MPI's progress on ``comm`` meanwhile."""

    __slots__ = ("_comm", "_happened", "_looks")

    def __init__(self, happened: Callable[[], bool], comm: MPI.Intracomm) -> None:
        self._happened, self._comm, self._looks = happened, comm, 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if self._happened():
            return True
        self._looks += 1
        if self._looks % _LOOKS_PER_PROGRESS == 0:
            self._comm.Iprobe()
        return False

    def Wait(self) -> None:  # noqa: N802 - MPI's name
        self.wait_checking(lambda: None, math.inf)

    def wait_checking(self, check: Callable[[], None], limit_s: float) -> bool:
        """Return False after ``limit_s`` seconds; call ``check`` each millisecond."""
        self._looks, began_s = 0, time.monotonic()
        checked_s = began_s
        while not self.Test():
            now_s = time.monotonic()
            if now_s - checked_s > _CHECK_S:
                if now_s - began_s > limit_s:
                    return False
                check()
                checked_s = time.monotonic()
            if self._looks > _LOOKS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)
            else:
                os.sched_yield()
        return True


class EagerBuffers(Resource):
    """A group's buffers on one node, from ``start`` in ``memory``."""

    def __init__(self, link: Link, memory: mmap.mmap, start: int) -> None:
        self._memory, self._start = memory, start
        self._rank, self._size = link.rank, link.size
        self._comm = link.later
        self._number = self._complete = 0
        """Last rounds: begun, and with all ranks."""
        self._records = slice(0, 0)
        self._expected = b""
        self._words = memoryview(memory).cast("q")
        self._numbers = [
            self._words[records.start // 8 : records.stop // 8 : _RECORD.size // 8]
            for records in map(self._records_of, range(_BUFFERS))
        ]
        self._oversubscribed = link.size > available_cores()
        """The others may need this rank's core."""

    def _records_of(self, number: int) -> slice:
        start = self._start + number % _BUFFERS * self._size * _RECORD.size
        return slice(start, start + self._size * _RECORD.size)

    def rounds(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Round]:
        strides = (BUFFER_BYTES, *np.empty(shape, dtype).strides)
        found = []
        for number in range(_BUFFERS):
            start = self._start + self._size * (mmap.PAGESIZE + number * BUFFER_BYTES)
            table: Array = np.ndarray((self._size, *shape), dtype, self._memory, start, strides)
            records = self._records_of(number)
            own = records.start + self._rank * _RECORD.size
            call = slice(own + _NUMBER_BYTES, own + _RECORD.size)
            rows = [table[rank, ...] for rank in range(self._size)]
            found.append(Round(records, call, own // 8, table, rows, rows[self._rank]))
        return found

    def writable(self) -> bool:
        oldest = self._number + 2 - _BUFFERS
        if oldest <= self._complete:
            return True
        for number in range(self._number, oldest - 1, -1):  # mostly the others are near
            if min(self._numbers[number % _BUFFERS]) >= number:  # a rank ahead may have reused the place
                self._complete = number
                return True
        return False

    def begin(self, rounds: list[Round], call: bytes, x: Array | None, change: Callable[[Array], None] | None) -> Round:
        """Begin the next round, which must be `writable`.

        ``call``, with its sequence number, is equal on all ranks; ``change`` is applied to the copy of ``x`` before
        others see it.
        """
        self._number = number = self._number + 1
        current = rounds[number % _BUFFERS]
        if x is not None:
            current.own[...] = x
            if change is not None:
                change(current.own)
        self._words[current.own_number] = 0  # no record has half of another one under its number
        self._memory[current.own_call] = call
        self._words[current.own_number] = number
        self._records, self._expected = current.records, (number.to_bytes(8, "little") + call) * self._size
        return current

    def all_arrived(self) -> bool:
        if self._memory[self._records] != self._expected:
            return False
        self._complete = self._number
        return True

    def arrived(self, rank: int) -> Callable[[], bool]:
        """Return a function that tells whether ``rank`` makes this round's call."""
        first = rank * _RECORD.size

        def it_arrived() -> bool:
            start = self._records.start + first
            return self._memory[start : start + _RECORD.size] == self._expected[: _RECORD.size]

        return it_arrived

    def spin(self, happened: Callable[[], bool]) -> bool:
        """Return False if it has not happened after some looks."""
        for _ in range(_LOOKS):
            if self._oversubscribed:
                os.sched_yield()
            if happened():
                return True
        return False

    def spin_wait(self, happened: Callable[[], bool]) -> SpinWait:
        return SpinWait(happened, self._comm)

    def calls(self) -> list[list[tuple[int, int, int, int, int]]]:
        """Return the calls (rank, sequence, kind, count, root) of the last rounds, this rank's first; in any thread.

        Records in the middle of a store are left out, or, if this rank's, the round.
        """
        found = []
        for number in range(self._number, max(self._number - _BUFFERS, 0), -1):
            # Whole: its number was there before it was read, and still is.
            before = list(self._numbers[number % _BUFFERS])
            records = list(_RECORD.iter_unpack(self._memory[self._records_of(number)]))
            after = list(self._numbers[number % _BUFFERS])
            ranks = [self._rank, *(rank for rank in range(self._size) if rank != self._rank)]
            whole = [rank for rank in ranks if before[rank] == after[rank] == number]
            if whole[:1] == [self._rank]:
                found.append([(rank, *records[rank][1:]) for rank in whole])
        return found

    def close(self) -> None:
        del self._memory, self._numbers, self._words

    def drop(self, error: Exception) -> None:
        """Keep the memory: a thread may still look at it."""

"""Eager buffers: short arrays of a node's ranks, exchanged without a message.

Every rank has four buffers in shared memory and uses them in turn, one for each round. In a round it writes its array,
if it has one, and then a record of its call, the number of the round last. A peer that sees this number may read the
array. All ranks take part in every round, so a buffer is free once all ranks have arrived in the next round.

Python has no memory fences. On x86 other processors see a thread's stores in the order of the program [1]_; on other
processors there are no eager buffers. The number of a record is erased before the record is overwritten.

References
----------
.. [1] P. Sewell et al., "x86-TSO: a rigorous and usable programmer's model for x86 multiprocessors", CACM 53 (7), 2010.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import pause
from mpiddp.typing import Array

from . import cma
from .segment import SKEW_BYTES, address_of, random_bits

_ROUND_BYTES = 1 << 20
"""The size of all ranks' buffers of one round together. Pieces of arrays should stay in the processors' caches."""
MAX_RANKS = 8
"""Larger groups have no eager buffers, because each rank would have to read too many arrays."""
BUFFERS = 4
"""The number of buffers of each rank. The root of several broadcasts may be ahead of the other ranks by fewer rounds
than this."""
_RECORD = struct.Struct("<qqQqq")
"""The format of a record: the number of the round, and the call's sequence number, kind, count and root."""
_NUMBER_BYTES = 8
SIZE, ADDRESS, TAKEN, COST, BLOCK_WORDS = range(5)
"""The kinds of words that ranks write for each other about a block. `SIZE` is its size in bytes, or minus that number
if the block would fit its slot of the buffer but is not there. `ADDRESS` is where it lies if the receiver may read it
there, else 0. `TAKEN` is the number of the round once the receiver has read it, or minus that number if the receiver
cannot. `COST` is the time that the receiver took. `BLOCK_WORDS` counts the kinds."""

ORDERED = os.uname().machine.lower() in ("x86_64", "amd64", "i386", "i686")
"""True if other processors see a thread's stores in the order of the program."""

# How often a wait looks without a pause, because the other ranks mostly arrive soon. Then it yields the core after each
# look, and later it sleeps.
LOOKS = 40
# The number of looks of a wait between two calls of MPI. Another rank may be late because it waits for a message from
# this one, and messages move only inside MPI's calls.
_LOOKS_PER_PROGRESS = 16
# The time after which `spin` ends even with looks left, because one look may take milliseconds on a busy machine.
_CHECK_S = 1e-3


def region_bytes(link: Link) -> int:
    """Return how much memory each rank of the group needs; 0 if it gets no eager buffers."""
    usable = link.one_node and 1 < link.size <= MAX_RANKS and ORDERED and settings.eager()
    return mmap.PAGESIZE + BUFFERS * buffer_bytes(link.size) if usable else 0


def buffer_bytes(ranks: int) -> int:
    """Return the size of each buffer in a group of so many ranks."""
    return _ROUND_BYTES // ranks // mmap.PAGESIZE * mmap.PAGESIZE


@dataclass(slots=True, eq=False)
class Round:
    """The places of a round's records and arrays in the memory."""

    records: slice
    """The place of all ranks' records."""
    own_call: slice
    """The place of this rank's record, without its number."""
    own_number: int
    """The index of this rank's number among the memory's 8-byte words."""
    table: Array
    """The arrays of all ranks, as one array of shape (ranks, ...)."""
    rows: list[Array]
    later_rows: list[Array]
    """The rows of the third rank and of all later ones."""
    own: Array
    place: slice
    """The place of ``own`` in the memory."""


class SpinWait:
    """An event in shared memory. A wait for it lets MPI make progress on ``comm`` meanwhile."""

    __slots__ = ("_comm", "_looks", "happened")

    def __init__(self, happened: Callable[[], bool], comm: MPI.Intracomm) -> None:
        self.happened, self._comm, self._looks = happened, comm, 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if self.happened():
            return True
        self._looks += 1
        if self._looks % _LOOKS_PER_PROGRESS == 0:
            self._comm.Iprobe()
        return False

    def Wait(self) -> None:  # noqa: N802 - MPI's name
        self._looks = 0
        while not self.Test():
            pause(self._looks)


class EagerBuffers(Resource):
    """The buffers of a group whose ranks are on one node. They begin at ``start`` in ``memory``.

    A group that is given up keeps its buffers, because the watchdog's thread may still look at them.
    """

    def __init__(self, link: Link, memory: mmap.mmap, start: int) -> None:
        self.memory, self._start = memory, start
        self._rank, self._size = link.rank, link.size
        self.buffer_bytes = buffer_bytes(link.size)
        """The size of each buffer. Longer arrays go in pieces."""
        self._comm = link.later
        self.number = self._complete = 0
        """The last round that this rank has begun, and the last one in which all ranks are known to have arrived."""
        self._records, self._expected = slice(0, 0), b""
        self.arrival = self.spin_wait(self._all_arrived)
        """The event that all ranks have arrived in the current round, with the same call."""
        self.words = memoryview(memory).cast("q")
        records, step = map(self._records_of, range(BUFFERS)), _RECORD.size // 8
        self._numbers = [self.words[each.start // 8 : each.stop // 8 : step] for each in records]
        self.told: list[object] = [None] * BUFFERS
        """For each buffer, the object from which this rank has written its block sizes last; None if other numbers may
        be in these words. With the same object in a later call they need not be written again."""
        self._identity = self.position(BLOCK_WORDS, 0, 0, 0)
        """The index in `words` from which on each rank has three words: its process id, and a token's address and
        value."""
        self._token = np.array([random_bits() | 1])
        for index, word in enumerate((os.getpid(), address_of(self._token), int(self._token[0]))):
            self.words[self._identity + 3 * link.rank + index] = word
        self._readable: dict[int, bool] = {}
        self._crowded = link.world.crowded
        """True if there are more ranks than cores, so that a rank that looks may keep another one from its core."""

    def _records_of(self, number: int) -> slice:
        start = self._start + number % BUFFERS * self._size * _RECORD.size
        return slice(start, start + self._size * _RECORD.size)

    def position(self, kind: int, buffer: int, receiver: int, sender: int) -> int:
        """Return the index in `words` of a word of this kind about a block, in rounds with this buffer."""
        first: int = self._records_of(BUFFERS - 1).stop // 8
        return first + ((kind * BUFFERS + buffer) * self._size + receiver) * self._size + sender

    def reads(self, rank: int) -> bool:
        """Return True if this rank can read the memory of another one. It tries this once."""
        found = self._readable.get(rank)
        if found is None:
            pid, address, token = self.words[self._identity + 3 * rank : self._identity + 3 * rank + 3]
            if not token:  # the other rank has not written its words yet
                return False
            found = self._readable[rank] = cma.attempt(pid, address, token) == 0
        return found

    def read(self, rank: int, address: int, into: Array) -> bool:
        """Copy from the memory of another rank; return False if that is impossible."""
        return self.reads(rank) and cma.read(self.words[self._identity + 3 * rank], address, into) == 0

    def rounds(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, joined: bool = False) -> list[Round]:
        """Return the places of the four rounds for calls with arrays of this shape and dtype.

        The ranks' arrays lie in buffers of their own or, if ``joined``, side by side from the first rank's buffer on.
        """
        row: Array = np.empty(shape, dtype)
        strides = (row.nbytes if joined else self.buffer_bytes, *row.strides)
        rounds = []
        for number in range(BUFFERS):
            start = self._start + self._size * (mmap.PAGESIZE + number * self.buffer_bytes) - SKEW_BYTES
            table: Array = np.ndarray((self._size, *shape), dtype, self.memory, start, strides)
            records = self._records_of(number)
            own = records.start + self._rank * _RECORD.size
            call = slice(own + _NUMBER_BYTES, own + _RECORD.size)
            rows = [table[rank, ...] for rank in range(self._size)]
            start += self._rank * strides[0]
            place = slice(start, start + row.nbytes)
            rounds.append(Round(records, call, own // 8, table, rows, rows[2:], rows[self._rank], place))
        return rounds

    def writable(self) -> bool:
        """Return True if this rank's buffer of the next round is free: all ranks have read what was in it."""
        oldest = self.number + 2 - BUFFERS
        if oldest <= self._complete:
            return True
        for number in range(self.number, oldest - 1, -1):  # from the newest round, which mostly all ranks have reached
            if min(self._numbers[number % BUFFERS]) >= number:  # a rank that is ahead may have stored a larger number
                self._complete = number
                return True
        return False

    def begin(self, rounds: list[Round], call: bytes, x: Any, write: Callable[[Array, Array], object] | None) -> Round:
        """Begin the next round, which must be `writable`.

        ``call``, a record without its number, is equal on all ranks that agree. ``write`` is needed if ``x`` has gaps
        or is to be changed: it writes ``x`` to this rank's array of the round. Without it ``x`` is copied as bytes.
        """
        self.number = number = self.number + 1
        current = rounds[number % BUFFERS]
        if write is not None and x is not None:
            write(current.own, x)
        elif x is not None:
            self.memory[current.place] = x  # this takes half the time of NumPy's assignment
        self.words[current.own_number] = 0  # so that no rank sees half of the new record under the old number
        self.memory[current.own_call] = call
        self.words[current.own_number] = number
        self._records, self._expected = current.records, (number.to_bytes(8, "little") + call) * self._size
        return current

    @property
    def call(self) -> bytes:
        """The record of this round's call, without a number: the call's other rounds begin with it, too."""
        return self._expected[_NUMBER_BYTES : _RECORD.size]

    def _all_arrived(self) -> bool:
        if self.memory[self._records] != self._expected:
            return False
        self._complete = self.number
        return True

    def arrival_of(self, rank: int) -> SpinWait:
        """Return the event that ``rank`` has arrived in the current round, with the same call."""
        first = rank * _RECORD.size

        def it_arrived() -> bool:
            start = self._records.start + first
            return self.memory[start : start + _RECORD.size] == self._expected[: _RECORD.size]

        return self.spin_wait(it_arrived)

    def spin(self, happened: Callable[[], bool], looks: int = LOOKS) -> bool:
        """Look up to ``looks`` times, for about a millisecond at most; return True if ``happened()`` became true."""
        began_s = time.monotonic()
        for look in range(1, looks + 1):
            if self._crowded:
                os.sched_yield()
            if happened():
                return True
            if look % LOOKS == 0 and time.monotonic() - began_s > _CHECK_S:  # a yield may take a time slice
                break
        return False

    def spin_wait(self, happened: Callable[[], bool]) -> SpinWait:
        return SpinWait(happened, self._comm)

    def calls(self) -> list[list[tuple[int, int, int, int, int]]]:
        """Return the calls of the last rounds: for each a list of (rank, sequence, kind, count, root), this rank first.

        Any thread may ask. A record that is just being written is left out. If this is the record of this rank, the
        whole round is left out.
        """
        calls = []
        for number in range(self.number, max(self.number - BUFFERS, 0), -1):
            # A record is whole if its number was there before it was read, and is there still.
            before = list(self._numbers[number % BUFFERS])
            records = list(_RECORD.iter_unpack(self.memory[self._records_of(number)]))
            after = list(self._numbers[number % BUFFERS])
            ranks = [self._rank, *(rank for rank in range(self._size) if rank != self._rank)]
            whole = [rank for rank in ranks if before[rank] == after[rank] == number]
            if whole[:1] == [self._rank]:
                calls.append([(rank, *records[rank][1:]) for rank in whole])
        return calls

    def close(self) -> None:
        del self.memory, self._numbers, self.words, self.told  # these keep the memory mapped

"""FIFOs: short messages between the ranks of a node, in memory that they share.

Every rank has a FIFO from each other one. The sender copies a message into the next slot and then raises the head; the
receiver copies it out and then raises the tail. Long messages go by MPI, as do those that find no free slot. A sender
that has sent by MPI uses the FIFO again when the receiver has taken all of that. What lies in a FIFO was therefore sent
before what MPI holds, and messages keep their order.

Heads, tails and counts are in the shared memory alone, each written by one side, so that a Ctrl-C leaves them valid.
Other processors must see a thread's stores in the order of the program, as for the eager buffers.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpiddp.errors import DistError
from mpiddp.typing import Array

from .lazy import MPI
from .link import Link, Resource, aborted
from .message import as_bytes, size_of
from .requests import READY, Awaited, lock

_SLOTS = 8
ANY_SOURCE: int = -1
_RANK_BYTES = 33 << 13
"""The slots of all FIFOs to one rank have so much together: of two ranks each a little more than 32 KiB."""
_LINE_BYTES = 64
_HEAD, _SENT, _TAIL, _TAKEN = 0, 8, 16, 17
"""Words of a FIFO: how many messages were put into it, and how many were sent by MPI, both told by the sender; how many
were taken out of it, and how many of MPI's have been received, both told by the receiver. Words that are not written
together lie in different lines of the processor's caches."""
_FIRST_BYTES = 4 * _LINE_BYTES
_PAYLOAD_BYTES = 16
"""A slot begins with a word that tells its message's tag and size, and with the message's number, which is written
last. Behind them, where any element is aligned, is the message, so that a short one takes one line with them."""
_SIZE_BITS = 20


def _slot_bytes(ranks: int) -> int:
    return _RANK_BYTES // ((ranks - 1) * _SLOTS) // _LINE_BYTES * _LINE_BYTES


def _fifo_bytes(ranks: int) -> int:
    return _FIRST_BYTES + _SLOTS * _slot_bytes(ranks)


def region_bytes(ranks: int) -> int:
    """Return how much memory each rank of a group needs."""
    return -(-(_LINE_BYTES + (ranks - 1) * _fifo_bytes(ranks)) // mmap.PAGESIZE) * mmap.PAGESIZE


class Letter:
    """A message that was copied out of a FIFO before its receive was known, with what ``MPI.Message`` has."""

    __slots__ = ("_bytes",)

    def __init__(self, content: bytes) -> None:
        self._bytes: bytes | None = content

    def __bool__(self) -> bool:
        return self._bytes is not None

    def Irecv(self, what: Any) -> Awaited:  # noqa: N802 - MPI's name
        assert self._bytes is not None
        as_bytes(what[0])[: len(self._bytes)] = np.frombuffer(self._bytes, np.uint8)
        self._bytes = None
        return READY


Arrival: TypeAlias = "tuple[int, int, int, MPI.Message | Letter]"
"""A message that has come: its sender, tag and bytes, and itself."""


class Fifo:
    """The messages from one rank to another."""

    __slots__ = ("heads", "memory", "room", "sender", "slots", "words")

    def __init__(self, sender: int, receiver: int, memory: mmap.mmap, start: int, ranks: int) -> None:
        self.sender, self.memory = sender, memory
        self.heads = memoryview(memory)[start : start + _LINE_BYTES].cast("q")
        """The heads of all FIFOs to the receiver, by their senders."""
        start += _LINE_BYTES + ((sender - receiver) % ranks - 1) * _fifo_bytes(ranks)
        self.words = memoryview(memory)[start : start + _fifo_bytes(ranks)].cast("q")
        places = range(_FIRST_BYTES, _fifo_bytes(ranks), _slot_bytes(ranks))
        self.slots = [(place // 8, start + place + _PAYLOAD_BYTES) for place in places]
        """For each slot the index of its first word in `words`, and where in the memory its message begins."""
        self.room = 0
        """The head up to which the sender may put messages without another look at the receiver's words."""

    def may_put(self, head: int) -> bool:
        words = self.words
        self.room = words[_TAIL] + _SLOTS if words[_SENT] == words[_TAKEN] else 0
        return head < self.room

    def peek(self) -> tuple[int, int] | None:
        """Return the tag and the bytes of the next message, if there is one. Any thread may ask."""
        words = self.words
        tail = words[_TAIL]
        first = self.slots[tail % _SLOTS][0]
        return divmod(words[first], 1 << _SIZE_BITS) if words[first + 1] == tail + 1 else None

    def take(self) -> Arrival | None:
        """Copy the next message out of its slot."""
        envelope = self.peek()
        if envelope is None:
            return None
        tag, size_bytes = envelope
        tail = self.words[_TAIL]
        start = self.slots[tail % _SLOTS][1]
        arrival = self.sender, tag, size_bytes, Letter(self.memory[start : start + size_bytes])
        self.words[_TAIL] = tail + 1
        return arrival


class EqualMessages:
    """Messages with one tag, dtype and shape to a rank, from a rank or from any. They take the least time."""

    __slots__ = ("_dtype", "_fifos", "_shape", "_size_bytes", "_views", "_word")

    def __init__(self, fifos: tuple[Fifo, ...], tag: int, x: Array) -> None:
        self._fifos, self._dtype, self._shape, self._size_bytes = fifos, x.dtype, x.shape, x.nbytes
        self._word = tag << _SIZE_BITS | x.nbytes
        self._views: dict[int, Array] = {}
        """The slots' messages as such arrays, by their positions in the memory, made at their first use."""

    def put(self, x: Any) -> bool:
        """Send; return False if the message has to go by MPI."""
        fifo = self._fifos[0]
        lock.acquire()  # less time than a with statement
        try:
            words = fifo.words
            head = words[_HEAD]
            if head >= fifo.room and not fifo.may_put(head):
                return False
            first, start = fifo.slots[head % _SLOTS]
            fifo.memory[start : start + self._size_bytes] = x
            words[first] = self._word
            words[first + 1] = words[_HEAD] = fifo.heads[fifo.sender] = head + 1
            return True
        finally:
            lock.release()

    def take(self, x: Array, looks: int, receive: Any) -> bool:
        """Receive, after some looks; return False if no message comes, or if the next one is another or MPI's.

        The sender becomes an attribute of ``receive``. A Ctrl-C leaves both there or neither, because it comes at a
        call or the next step of a loop. The caller holds `requests.lock`.
        """
        for _ in range(looks):
            for fifo in self._fifos:
                words = fifo.words
                tail = words[_TAIL]
                first, start = fifo.slots[tail % _SLOTS]
                if words[first + 1] != tail + 1:
                    if words[_SENT] != words[_TAKEN]:
                        return False
                    continue
                if words[first] != self._word:
                    return False
                view = self._views.get(start)
                if view is None:
                    view = self._views[start] = np.ndarray(self._shape, self._dtype, fifo.memory, start)
                x[...] = view
                receive.sender = fifo.sender
                words[_TAIL] = tail + 1
                return True
        return False


class Fifos(Resource):
    """All messages from and to this rank: by FIFOs, if the group has ``memory`` for them, and by MPI."""

    def __init__(self, link: Link, memory: mmap.mmap | None = None, start: int = 0) -> None:
        self.comm, self._rank, self._size = link.messages, link.rank, link.size
        self._from: dict[int, Fifo] = {}
        self._to: dict[int, Fifo] = {}
        self._heads, self._empty = memoryview(b""), b""
        """The heads of the FIFOs to this rank, and what they were when all were found empty."""
        if memory is not None:
            region = region_bytes(link.size)
            starts = range(start, start + link.size * region, region)
            me = link.rank
            self._heads = memoryview(memory)[starts[me] : starts[me] + _LINE_BYTES]
            for rank in range(link.size):
                if rank != me:
                    self._from[rank] = Fifo(rank, me, memory, starts[me], link.size)
                    self._to[rank] = Fifo(me, rank, memory, starts[rank], link.size)
        self._status = status = MPI.Status()
        probe = partial(self.comm.Improbe, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        self._probes: Iterator[MPI.Message | None] = iter(probe, object())
        """Improbe's results. After a call of it a Ctrl-C could lose the message; none comes within a loop's step."""
        self._probed: MPI.Message | None = None
        """The message of ``status``, until it is returned."""

    def equals(self, x: Array, peer: int, tag: int, sends: bool) -> EqualMessages | None:
        """Return the messages like ``x`` to or from a rank, or from any; None if they are not for a FIFO."""
        if not self._from or x.nbytes > _slot_bytes(self._size) - _PAYLOAD_BYTES or peer == self._rank:
            return None
        if peer == ANY_SOURCE:
            return EqualMessages((*self._from.values(),), tag, x)
        return EqualMessages(((self._to if sends else self._from)[peer],), tag, x)

    def Isend(self, what: Any, to: int, tag: int) -> MPI.Request:  # noqa: N802 - MPI's name
        """Send by MPI."""
        with lock:
            if to in self._to:
                self._to[to].words[_SENT] += 1
                self._to[to].room = 0
            return self.comm.Isend(what, to, tag)

    def arrive(self) -> Arrival | None:
        """Return a message that has come."""
        if self._probed is None:
            for message in self._probes:
                self._probed = message
                break
        if self._probed is None:
            heads = self._heads.tobytes()
            if heads != self._empty:
                for each in self._from.values():
                    arrival = each.take()
                    if arrival is not None:
                        return arrival
                self._empty = heads
            return None
        status = self._status
        sender = status.Get_source()
        fifo = self._from.get(sender)
        if fifo is not None:
            earlier = fifo.take()
            if earlier is not None:
                return earlier
        arrival = sender, status.Get_tag(), size_of(status), self._probed
        if fifo is not None:
            fifo.words[_TAKEN] += 1
        self._probed = None
        return arrival

    def unmatched(self) -> list[tuple[int, int, int]]:
        """Return sender, tag and bytes of the next messages. Any thread may ask."""
        status = MPI.Status()
        peeks = [(sender, fifo.peek()) for sender, fifo in self._from.items()]
        found = [(sender, *envelope) for sender, envelope in peeks if envelope is not None]
        if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            found.append((status.Get_source(), status.Get_tag(), size_of(status)))
        return found

    def drop(self, error: DistError) -> None:
        self.comm = aborted(error)
        self._from, self._to = {}, {}

    def close(self) -> None:
        self._from, self._to, self._heads = {}, {}, memoryview(b"")  # which hold the memory

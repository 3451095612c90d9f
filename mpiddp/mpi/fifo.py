"""FIFOs: short messages between the ranks of a node, in memory that they share.

Every rank has a FIFO from each other rank. The sender copies a message into the next slots and then raises the head;
the receiver copies it out and then raises the tail. Long messages go by MPI, as do messages that find no free slot. A
sender that has sent by MPI uses the FIFO again when the receiver has taken all messages that it sent by MPI. Messages
in a FIFO were therefore sent before those that MPI holds, and all keep their order.

Heads, tails and counts are stored in the shared memory only, and each is written by one rank only. So a Ctrl-C leaves
them valid. Other processors must see a thread's stores in the order of the program, as for eager buffers
(`mpiddp.shm.eager`).
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
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

ANY_SOURCE: int = -1
_SLOTS, _MOST_SLOTS = 64, 8
"""The number of slots of a FIFO, and the number of slots that the longest message takes. A message that begins in one
of the last slots may extend into memory behind the last slot."""
_RANK_BYTES = 33 << 13
"""The size of the slots of all FIFOs to one rank. With two ranks the longest message is just under 33 KiB."""
_LINE_BYTES = 64
_HEAD, _SENT, _TAIL, _TAKEN = 0, 8, 16, 17
"""Indices of a FIFO's words. In the first two the sender counts the slots that it has filled, and the messages that it
has sent by MPI. In the other two the receiver counts the slots that it has emptied, and the messages that it has
received by MPI. Words that are not written together lie in different lines of the processor's caches."""
_FIRST_BYTES = 4 * _LINE_BYTES
_PAYLOAD_BYTES = 16
"""The offset of a message's bytes in its first slot. Two words precede them: one has the message's tag and size, and
the other is the slot's number, which is written last. Elements of any dtype are aligned at this offset. A short message
and both words lie in one cache line."""
_SIZE_BITS = 20
"""The number of bits for the size in a message's first word; the longest message needs fewer. The other bits have the
tag."""
_MOST_VIEWS = 1000
_LAST_LOOKS = 100
"""How often a group that ends looks for messages that nobody has received. At each look MPI takes in only a few of the
messages that have come."""


def _slot_bytes(ranks: int) -> int:
    return _RANK_BYTES // ((ranks - 1) * _SLOTS) // _LINE_BYTES * _LINE_BYTES


def _fifo_bytes(ranks: int) -> int:
    return _FIRST_BYTES + (_SLOTS + _MOST_SLOTS - 1) * _slot_bytes(ranks)


def region_bytes(ranks: int) -> int:
    """Return how many bytes of shared memory each rank of a group needs for its FIFOs."""
    return -(-(_LINE_BYTES + (ranks - 1) * _fifo_bytes(ranks)) // mmap.PAGESIZE) * mmap.PAGESIZE


class Letter:
    """A message that was copied out of a FIFO, because `Lane.take` could not write it to a receive's array.

    It can be used as an ``MPI.Message``.
    """

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
"""A message that has come: its sender, its tag, its size in bytes, and the message itself."""


class Fifo:
    """The FIFO of messages from one rank to another."""

    __slots__ = ("heads", "memory", "room", "sender", "slot_bytes", "slots", "words")

    def __init__(self, sender: int, receiver: int, memory: mmap.mmap, start: int, ranks: int) -> None:
        self.sender, self.memory, self.slot_bytes = sender, memory, _slot_bytes(ranks)
        self.heads = memoryview(memory)[start : start + _LINE_BYTES].cast("q")
        """The heads of all FIFOs to the receiver, by sender. A cache line holds 8; larger groups have no FIFOs."""
        start += _LINE_BYTES + ((sender - receiver) % ranks - 1) * _fifo_bytes(ranks)
        self.words = memoryview(memory)[start : start + _fifo_bytes(ranks)].cast("q")
        places = [_FIRST_BYTES + slot * self.slot_bytes for slot in range(_SLOTS)]
        self.slots = [(place // 8, start + place + _PAYLOAD_BYTES) for place in places]
        """For each slot, the index of its first word in `words`, and the offset in `memory` of a message's bytes."""
        self.room = 0
        """The head up to which the sender may fill slots without another look at the receiver's words."""

    def slots_of(self, size_bytes: int) -> int:
        return -(-(_PAYLOAD_BYTES + size_bytes) // self.slot_bytes)

    def has_room(self, count: int) -> bool:
        """Read the receiver's words; return True if ``count`` slots and the slot behind them are free.

        Return False, too, until the receiver has taken all messages that the sender has sent by MPI.
        """
        words = self.words
        self.room = words[_TAIL] + _SLOTS - 1 if words[_SENT] == words[_TAKEN] else 0
        return words[_HEAD] + count <= self.room

    def peek(self) -> tuple[int, int, int, int] | None:
        """Return the tail, and the next message's offset in the memory, tag and size in bytes; None without a message.

        Any thread may call this.
        """
        words = self.words
        tail = words[_TAIL]
        first, start = self.slots[tail % _SLOTS]
        return (tail, start, *divmod(words[first], 1 << _SIZE_BITS)) if words[first + 1] == tail + 1 else None

    def take(self) -> Arrival | None:
        """Copy the next message out of its slots, and return it; None if there is no message."""
        while (found := self.peek()) is not None:
            tail, start, tag, size_bytes = found
            arrival = self.sender, tag, size_bytes, Letter(self.memory[start : start + size_bytes])
            behind = tail + self.slots_of(size_bytes)
            if self.words[_TAIL] == tail:  # otherwise a signal's handler has received the message
                self.words[_TAIL] = behind
                return arrival
        return None


class Lane:
    """The fast path through FIFOs for messages with one tag, dtype and shape.

    All of its messages go to one rank, come from one rank, or come from any rank.
    """

    __slots__ = ("__weakref__", "_count", "_dtype", "_fifos", "_shape", "_size_bytes", "_views", "_word")

    def __init__(self, fifos: tuple[Fifo, ...], tag: int, x: Array) -> None:
        self._fifos, self._dtype, self._shape, self._size_bytes = fifos, x.dtype, x.shape, x.nbytes
        self._word, self._count = tag << _SIZE_BITS | x.nbytes, fifos[0].slots_of(x.nbytes)
        self._views: dict[Any, Array] = {}
        """Arrays over the slots in which messages come, by the message's offset in the memory. For a message that is
        shorter than the lane's arrays, the key is the offset and the size."""

    def put(self, x: Any) -> bool:
        """Send ``x`` through the FIFO; return False if it has to go by MPI."""
        with lock:
            fifo, count = self._fifos[0], self._count
            words = fifo.words
            if words[_HEAD] + count > fifo.room and not fifo.has_room(count):
                return False
            head = words[_HEAD]
            first, start = fifo.slots[head % _SLOTS]
            fifo.memory[start : start + self._size_bytes] = x
            behind, _ = fifo.slots[(head + count) % _SLOTS]
            words[behind + 1] = 0  # A part of an earlier message may lie in this word, and look like the slot's number.
            words[first] = self._word
            words[first + 1] = head + 1
            words[_HEAD] = fifo.heads[fifo.sender] = head + count
            return True

    def take(self, x: Array, looks: int, receive: Any) -> bool:
        """Receive a message into ``x``, and set its sender and size in ``receive``. The caller holds `requests.lock`.

        Return False if no message comes in ``looks`` looks, or if the next message is of another kind or comes by MPI.
        If several ranks have sent, the lowest rank's message is taken. A Ctrl-C takes effect before the message is
        received or after it, because Python handles signals only at a call and at the next step of a loop.
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
                size_bytes, count = self._size_bytes, self._count
                if words[first] == self._word:
                    try:
                        view = self._views[start]
                    except KeyError:
                        view = self._views[start] = self._view(self._shape, fifo, start)
                    x[...] = view
                elif 0 < self._word - words[first] <= size_bytes:  # a message shorter than the lane's arrays
                    size_bytes -= self._word - words[first]
                    count, key = fifo.slots_of(size_bytes), (start, size_bytes)
                    if key not in self._views:
                        self._views[key] = self._view((size_bytes // x.itemsize,), fifo, start)
                    view = self._views[key]
                    x.reshape(-1)[: view.size] = view
                else:
                    return False
                if words[_TAIL] != tail:  # a signal's handler has received the message
                    continue
                receive.sender, receive.size_bytes = fifo.sender, size_bytes
                words[_TAIL] = tail + count
                return True
        return False

    def _view(self, shape: tuple[int, ...], fifo: Fifo, start: int) -> Array:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        return np.ndarray(shape, self._dtype, fifo.memory, start)

    def close(self) -> None:
        self._fifos = ()
        self._views.clear()


class Transport(Resource):
    """The transport of a group's messages to and from this rank.

    Messages go by MPI, or through FIFOs if the group has ``memory`` for these (see the module).
    """

    def __init__(self, link: Link, memory: mmap.mmap | None = None, start: int = 0) -> None:
        self.comm, self._rank, self._size = link.messages, link.rank, link.size
        self._from: dict[int, Fifo] = {}
        self._to: dict[int, Fifo] = {}
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._heads, self._empty = memoryview(b""), b""
        """The heads of the FIFOs to this rank, and a copy of them from the time when all FIFOs were found empty."""
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
        """An endless iterator that calls Improbe and returns its results. A Ctrl-C just after a plain call of Improbe
        could lose the message. Within the step of a for loop Python handles no Ctrl-C."""
        self._probed: MPI.Message | None = None
        """The message that the last probe has found, until `arrive` returns it."""

    def lane(self, x: Array, peer: int, tag: int, sends: bool) -> Lane | None:
        """Return the lane of messages like ``x`` to or from a rank, or from any; None if they have to go by MPI."""
        longest_bytes = _MOST_SLOTS * _slot_bytes(self._size) - _PAYLOAD_BYTES if self._from else -1
        if x.nbytes > longest_bytes or peer == self._rank:
            return None
        fifos = (*self._from.values(),) if peer == ANY_SOURCE else ((self._to if sends else self._from)[peer],)
        lane = Lane(fifos, tag, x)
        self._lanes.add(lane)
        return lane

    def Isend(self, what: Any, to: int, tag: int) -> MPI.Request:  # noqa: N802 - MPI's name
        """Begin to send by MPI, and count the message in the FIFO to its receiver."""
        with lock:
            if to in self._to:
                self._to[to].words[_SENT] += 1
                self._to[to].room = 0
            return self.comm.Isend(what, to, tag)

    def arrive(self) -> Arrival | None:
        """Return a message that has come, or None."""
        if self._probed is None:
            for found in self._probes:
                self._probed = found
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
        status, message = self._status, self._probed
        sender = status.Get_source()
        fifo = self._from.get(sender)
        if fifo is not None and self._heads.tobytes() != self._empty:
            earlier = fifo.take()
            if earlier is not None:
                return earlier
        arrival = sender, status.Get_tag(), size_of(status), message
        if self._probed is not message:  # a signal's handler has received the message
            return self.arrive()
        if fifo is not None:
            fifo.words[_TAKEN] += 1
        self._probed = None
        return arrival

    def unmatched(self) -> list[tuple[int, int, int]]:
        """Return sender, tag and bytes of the next message in each FIFO and in MPI, which stay there.

        Any thread may call this.
        """
        peeks = [(sender, fifo.peek()) for sender, fifo in self._from.items()]
        found = [(sender, *envelope[2:]) for sender, envelope in peeks if envelope is not None]
        probed, status = self._status, MPI.Status()
        statuses = [probed] * (self._probed is not None)
        if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            statuses.append(status)
        return found + [(each.Get_source(), each.Get_tag(), size_of(each)) for each in statuses]

    def holds_messages(self) -> bool:
        """Return True if MPI has a message for this rank that no receive has taken."""
        looks = (self.comm.Iprobe() for _ in range(_LAST_LOOKS))
        with contextlib.suppress(MPI.Exception):  # MPI raises it if a rank has failed
            return self._probed is not None or any(looks)
        return False

    def abort(self, error: DistError) -> None:
        self.comm = aborted(error)
        self._from, self._to = {}, {}

    def close(self) -> None:
        """Release the memory. The lanes release it, too, because messages that the program has kept refer to them."""
        for lane in self._lanes:
            lane.close()
        self._from, self._to, self._heads = {}, {}, memoryview(b"")

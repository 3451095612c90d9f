"""Blocks through eager buffers: gather, scatter, all_to_all, and all_gather with lists, on one node.

Blocks may differ in size between ranks. In one round every sender writes, for each receiver, the size of its block and
the block itself. In place of a block that is longer than its slot of the buffer it writes where the block lies. The
receiver reads it there by cross-memory attach, and says so. If it says that it cannot, and for the longest blocks, the
sender sends a message, which the receiver begins when it knows the size: MPI may crash in a receive that is too short.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, BlockError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_message
from mpiddp.mpi.requests import All, Driven, Steps
from mpiddp.shm.eager import ADDRESS, BUFFERS, SIZE, TAKEN, EagerBuffers, Round
from mpiddp.shm.segment import address_of
from mpiddp.typing import Array

from . import native
from .one_shot import Shot, whole
from .tags import Tag

_ALIGNED = 64
_READ_BYTES = 1 << 62
"""The longest block that is offered to be read."""
Cut = Callable[[Any], Sequence[Array]]


class _Offer(NamedTuple):
    """A block that its receiver may read."""

    rank: int
    taken: int
    """The position of the answer."""
    x: Array


class _Sent(NamedTuple):
    input: int
    """The number of the input."""
    slot: Array | None
    """None: the block is too long for it."""
    receivers: list[int]
    """The other ranks for whom it is."""


class _Received(NamedTuple):
    output: int
    """The number of the output."""
    slot: Array | None
    size_bytes: int
    size: int
    """The position of the size that the sender tells."""
    sender: int


class Blocks:
    """The blocks that one rank sends and receives in calls with arrays like ``inputs`` and ``outputs``.

    ``equal``: they are the rows of one array on each side.
    """

    def __init__(
        self,
        link: Link,
        operation: str,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        root: int,
        cuts: tuple[Cut, Cut],
        *,
        equal: bool = False,
    ) -> None:
        eager = link[EagerBuffers]
        self._link, self.eager, self._operation = link, eager, operation
        self._cut_output, self._cut_input = cuts
        everyone, me = range(link.size), link.rank
        one_for_all = operation in ("gather", "all_gather")
        slots = 1 if one_for_all else link.size
        self._slot_bytes = eager.buffer_bytes // slots // _ALIGNED * _ALIGNED
        receivers = everyone if root == NO_ROOT or operation == "scatter" else [root]
        to = [receivers] if one_for_all else [[rank] for rank in everyone]
        senders = [root] if operation == "scatter" else everyone
        self.rounds = eager.rounds((slots * self._slot_bytes,), np.dtype(np.uint8))
        self._own = (0 if one_for_all else me, 0 if operation == "scatter" else me)
        """The numbers of the input and of the output for this rank's block to itself."""
        self._copies_own = bool(inputs and outputs)
        self._sizes = [
            [
                (eager.position(SIZE, number, rank, me), x.nbytes)
                for x, ranks in zip(inputs, to, strict=bool(inputs))
                for rank in ranks
            ]
            for number in range(BUFFERS)
        ]
        self._sent = [
            [
                _Sent(index, self._slot_of(each.own, index, x), others)
                for index, (x, ranks) in enumerate(zip(inputs, to, strict=bool(inputs)))
                if (others := [rank for rank in ranks if rank != me])
            ]
            for each in self.rounds
        ]
        self._received = [
            [
                _Received(
                    index,
                    self._slot_of(each.rows[rank], 0 if one_for_all else me, x),
                    x.nbytes,
                    eager.position(SIZE, number, me, rank),
                    rank,
                )
                for index, (x, rank) in enumerate(zip(outputs, senders, strict=bool(outputs)))
                if rank != me
            ]
            for number, each in enumerate(self.rounds)
        ]
        self._tables: list[tuple[Array, Array]] = []
        """For each buffer the slots of all blocks, to write and to read them at once."""
        if equal and inputs[0].nbytes <= self._slot_bytes >= outputs[0].nbytes:
            for each in self.rounds:
                own = each.own.reshape(slots, -1)[:, : inputs[0].nbytes]
                mine = each.table.reshape(link.size, slots, -1)[:, me, : outputs[0].nbytes]
                self._tables.append((own.view(inputs[0].dtype), mine.view(outputs[0].dtype)))
        self._requests: list[MPI.Request] = []
        self._offers: list[_Offer] = []
        self._block: Array | None = None
        """What this rank sends itself."""
        self.awaited: Callable[[], bool] | None = None
        if operation == "scatter":
            self.awaited = None if me == root else eager.arrived(root)
        elif outputs:
            self.awaited = eager.all_arrived
        self.sends_long = any(x.nbytes > self._slot_bytes for x in inputs)

    def shot(self) -> Shot:
        return Shot(self.rounds, self.show, whole, None, self.awaited, self.take)

    def apart(self, given: Any, output: Any) -> Any:
        """Return the input, or a copy if it shares memory with the output and a message would see what is written."""
        if isinstance(given, np.ndarray) and isinstance(output, np.ndarray) and not np.may_share_memory(given, output):
            return given
        sent = list(self._cut_input(given))
        if len(sent) > 1:
            del sent[self._link.rank]  # is copied first
        if not native.overlap(self._cut_output(output), sent):
            return given
        return given.copy() if isinstance(given, np.ndarray) else [x.copy() for x in given]

    def _slot_of(self, row: Array, number: int, x: Array) -> Array | None:
        """Return a block of the row for an array like ``x``."""
        if x.nbytes > self._slot_bytes:
            return None
        return np.ndarray(x.shape, x.dtype, row[number * self._slot_bytes :])

    def send(self, x: Array, rank: int) -> MPI.Request:
        return self._link.later.Isend(as_message(x, x.nbytes), rank, Tag.LONG_BLOCK)

    def show(self, given: Any) -> None:
        """Write this rank's blocks into the buffer of the next round, which must be writable; send the long ones."""
        eager = self.eager
        buffer = (eager.number + 1) % BUFFERS
        if eager.told[buffer] is not self:  # else the sizes stand there from an earlier call
            eager.told[buffer] = None  # an interrupt may leave some of each
            for size, size_bytes in self._sizes[buffer]:
                eager.words[size] = size_bytes
            eager.told[buffer] = self
        if self._tables:
            slots = self._tables[buffer][0]
            slots[...] = given.reshape(slots.shape)
            return
        inputs = self._cut_input(given)
        if self._copies_own:
            self._block = inputs[self._own[0]]
        for index, slot, receivers in self._sent[buffer]:
            if slot is not None:
                slot[...] = inputs[index]
            else:
                self._offer(inputs[index], receivers, buffer)

    def _offer(self, x: Array, receivers: list[int], buffer: int) -> None:
        eager, me = self.eager, self._link.rank
        for rank in receivers:
            address = eager.position(ADDRESS, buffer, rank, me)
            if x.nbytes <= _READ_BYTES and eager.reads(rank):
                eager.words[address] = address_of(x)
                self._offers.append(_Offer(rank, eager.position(TAKEN, buffer, rank, me), x))
            else:
                eager.words[address] = 0
                self._requests.append(self.send(x, rank))

    def take(self, current: Round, given: Any) -> Driven | None:
        """Copy the blocks that have arrived; return what is left to wait for."""
        words, buffer, fault = self.eager.words, self.eager.number % BUFFERS, ""
        expected = self._received[buffer]
        if self._tables and [words[each.size] for each in expected] == [each.size_bytes for each in expected]:
            slots = self._tables[buffer][1]
            given.reshape(slots.shape)[...] = slots
            return None
        outputs = self._cut_output(given)
        if self._block is not None:  # first, because what arrives may replace it
            outputs[self._own[1]][...] = self._block
            self._block = None
        for index, slot, size_bytes, size, sender in expected:
            if slot is not None and words[size] == size_bytes:
                outputs[index][...] = slot
            else:
                wrong = self._take_long(outputs[index], words[size], sender)
                fault = fault or wrong
        if not (fault or self._requests or self._offers):
            return None
        rest = self._rest(self.eager.number, self._requests, self._offers, fault)
        self._requests, self._offers = [], []
        return Driven(lambda: rest)

    def _rest(self, number: int, requests: list[MPI.Request], offers: list[_Offer], fault: str) -> Steps:
        """Wait for the answers to offers, and for messages; a block of the wrong size is an error at the end."""
        words = self.eager.words

        def some_answered() -> bool:
            return any(abs(words[offer.taken]) == number for offer in offers)

        while offers:
            yield self.eager.spin_wait(some_answered)
            answered = [abs(words[offer.taken]) == number for offer in offers]
            refused = [offer for offer in itertools.compress(offers, answered) if words[offer.taken] < 0]
            requests += [self.send(offer.x, offer.rank) for offer in refused]
            offers = [offer for offer, is_answered in zip(offers, answered, strict=True) if not is_answered]
        yield All(requests)
        if fault:
            raise BlockError(fault)

    def _take_long(self, x: Array, sent_bytes: int, rank: int) -> str:
        """Begin to receive a block that is no short one of the right size; return what is wrong with it."""
        eager, me, fault = self.eager, self._link.rank, ""
        if sent_bytes != x.nbytes:
            fault = native.wrong_size(self._link, self._operation, rank, sent_bytes, x.nbytes)
            x = np.empty(sent_bytes, np.uint8)  # the message is received, so that the next is right
        if sent_bytes > self._slot_bytes:
            address, taken = (eager.position(kind, eager.number % BUFFERS, me, rank) for kind in (ADDRESS, TAKEN))
            there = eager.words[address]
            if there and eager.read(rank, there, x):
                eager.words[taken] = eager.number
            else:
                if there:
                    eager.words[taken] = -eager.number
                self._requests.append(self._link.later.Irecv(as_message(x, sent_bytes), rank, Tag.LONG_BLOCK))
        return fault

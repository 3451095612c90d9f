"""Blocks through eager buffers: gather, scatter, all_to_all, and all_gather with lists, on one node.

Blocks may differ in size between ranks. In one round every sender writes, for each receiver, the size of its block and
the block itself. In place of a block that is longer than its slot of the buffer it writes where the block lies. The
receiver reads it there by cross-memory attach, and says so. If it says that it cannot, and for the longest blocks, the
sender sends a message, which the receiver begins when it knows the size: MPI may crash in a receive that is too short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, BlockError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes, as_message
from mpiddp.mpi.requests import All
from mpiddp.shm.eager import ADDRESS, BUFFER_BYTES, SIZE, TAKEN, EagerBuffers, Round
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


class _Rest(All):
    """The rest of a call: offers and messages; a block of the wrong size is an error at the end."""

    def __init__(self, blocks: Blocks, requests: list[MPI.Request], offers: list[_Offer], fault: str) -> None:
        super().__init__(requests)
        self._blocks, self._offers, self._fault = blocks, offers, fault
        self._number = blocks.eager.number

    def Test(self) -> bool:  # noqa: N802
        return self._answered() and super().Test() and self._check()

    def Wait(self) -> None:  # noqa: N802
        if not self._answered():
            self._blocks.eager.spin_wait(self._answered).Wait()
        super().Wait()
        self._check()

    def _answered(self) -> bool:
        """Return True if all offers are answered; send what a receiver cannot read."""
        words, left = self._blocks.eager.words, []
        for offer in self._offers:
            answer = words[offer.taken]
            if answer == -self._number:
                self.requests.append(self._blocks.send(offer.x, offer.rank))
            elif answer != self._number:
                left.append(offer)
        self._offers = left
        return not left

    def _check(self) -> bool:
        if self._fault:
            raise BlockError(self._fault)
        return True


class _Sent(NamedTuple):
    slot: Array | None
    """None: the block is too long for it."""
    ranks: Sequence[int]
    """For whom it is."""
    told: list[tuple[int, int, int]]
    """For each of them the positions of the block's size, of its address, and of the answer."""
    size_bytes: int


class _Received(NamedTuple):
    slot: Array | None
    rank: int
    told: tuple[int, int, int]
    """The positions of the size and the address that the sender tells, and of the answer."""
    size_bytes: int
    output: int
    """The number of the output."""


class Blocks:
    """The blocks that one rank sends and receives in calls with arrays like ``inputs`` and ``outputs``."""

    def __init__(
        self,
        link: Link,
        operation: str,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        root: int,
        cuts: tuple[Cut, Cut],
    ) -> None:
        eager = link.find(EagerBuffers)
        assert eager is not None, "chosen where there are some"
        self._link, self.eager, self._operation = link, eager, operation
        self._cut_output, self._cut_input = cuts
        everyone, me = range(link.size), link.rank
        one_for_all = operation in ("gather", "all_gather")
        slots = 1 if one_for_all else link.size
        self._slot_bytes = BUFFER_BYTES // slots // _ALIGNED * _ALIGNED
        receivers = everyone if root == NO_ROOT or operation == "scatter" else [root]
        self._to = [(0, receivers)] if one_for_all else [(rank, [rank]) for rank in everyone]
        self._from = [root] if operation == "scatter" else [me, *(rank for rank in everyone if rank != me)]
        """Its own first, because what arrives may replace it."""
        self._slot = 0 if one_for_all else me
        self._likes = [(x.shape, x.dtype, x.nbytes) for x in inputs], [(x.shape, x.dtype, x.nbytes) for x in outputs]
        self.rounds = eager.rounds((slots * self._slot_bytes,), np.dtype(np.uint8))
        self._sent: list[list[_Sent] | None] = [None] * len(self.rounds)
        self._received: list[list[_Received] | None] = [None] * len(self.rounds)
        self._requests: list[MPI.Request] = []
        self._offers: list[_Offer] = []
        self._own: Array | None = None
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
        sent = list(self._cut_input(given))
        if len(sent) > 1:
            del sent[self._link.rank]  # is copied first
        if not native.overlap(self._cut_output(output), sent):
            return given
        return given.copy() if isinstance(given, np.ndarray) else [x.copy() for x in given]

    def _slot_of(self, row: Array, number: int, like: tuple[tuple[int, ...], np.dtype[Any], int]) -> Array | None:
        shape, dtype, size_bytes = like
        return None if size_bytes > self._slot_bytes else np.ndarray(shape, dtype, row[number * self._slot_bytes :])

    def _told(self, number: int, receiver: int, sender: int) -> tuple[int, int, int]:
        size, address, taken = (self.eager.position(kind, number, receiver, sender) for kind in (SIZE, ADDRESS, TAKEN))
        return size, address, taken

    def send(self, x: Array, rank: int) -> MPI.Request:
        return self._link.later.Isend(as_message(x, x.nbytes), rank, Tag.LONG_BLOCK)

    def _make_sent(self, number: int) -> list[_Sent]:
        row, mine = self.rounds[number].own, self._link.rank
        sent = []
        for (slot, ranks), like in zip(self._to, self._likes[0], strict=True):
            told = [self._told(number, rank, mine) for rank in ranks]
            sent.append(_Sent(self._slot_of(row, slot, like), ranks, told, like[2]))
        self._sent[number] = sent
        return sent

    def _make_received(self, number: int) -> list[_Received]:
        rows, mine = self.rounds[number].rows, self._link.rank
        received = []
        for rank in self._from:
            index = 0 if len(self._from) == 1 else rank
            like = self._likes[1][index]
            slot = self._slot_of(rows[rank], self._slot, like)
            told = self._told(number, mine, rank)
            received.append(_Received(slot, rank, told, like[2], index))
        self._received[number] = received
        return received

    def show(self, given: Any) -> None:
        """Write this rank's blocks into the buffer of the next round, which must be writable; send the long ones."""
        if not self._likes[0]:
            return
        number, words = self.eager.next_buffer(), self.eager.words
        sent = self._sent[number] or self._make_sent(number)
        for (slot, ranks, told, size_bytes), x in zip(sent, self._cut_input(given), strict=True):
            for size, _, _ in told:
                words[size] = size_bytes
            if slot is not None:
                slot[...] = x
                continue
            for rank, (_, address, taken) in zip(ranks, told, strict=True):
                if rank == self._link.rank:
                    self._own = x
                elif size_bytes <= _READ_BYTES and self.eager.reads(rank):
                    words[address] = address_of(x)
                    self._offers.append(_Offer(rank, taken, x))
                else:
                    words[address] = 0
                    self._requests.append(self.send(x, rank))

    def take(self, current: Round, given: Any) -> _Rest | None:
        """Copy the blocks that have arrived; return what is left to wait for."""
        requests, self._requests = self._requests, []
        offers, self._offers = self._offers, []
        fault, words, round_number = "", self.eager.words, self.eager.number
        if self._likes[1]:
            number, outputs = self.eager.current_buffer(), self._cut_output(given)
            for slot, rank, (size, place, taken), size_bytes, index in self._received[number] or self._make_received(
                number
            ):
                sent_bytes, x = words[size], outputs[index]
                if slot is not None and sent_bytes == size_bytes:
                    x[...] = slot
                    continue
                if sent_bytes != size_bytes:
                    fault = fault or native.wrong_size(self._link, self._operation, rank, sent_bytes, size_bytes)
                    x = np.empty(sent_bytes, np.uint8)  # the message is received, so that the next is right
                if sent_bytes > self._slot_bytes:
                    if rank == self._link.rank and self._own is not None:
                        as_bytes(x)[...] = as_bytes(self._own)
                    elif words[place] and self.eager.read(rank, words[place], x):
                        words[taken] = round_number
                    else:
                        if words[place]:
                            words[taken] = -round_number
                        message = as_message(x, sent_bytes)
                        requests.append(self._link.later.Irecv(message, rank, Tag.LONG_BLOCK))
        self._own = None
        return _Rest(self, requests, offers, fault) if requests or offers or fault else None

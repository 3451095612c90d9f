"""Blocks through eager buffers: gather, scatter, all_to_all, and all_gather with lists, on one node.

Blocks may differ in size between ranks. In one round every sender writes, for each receiver, the size of its block and
the block itself. If a block is longer than its slot of the buffer, the sender offers it: it writes the block's address
instead. The receiver reads an offered block by cross-memory attach, and answers that it has done so. If the receiver
answers that it cannot read the block, or if the sender cannot read the receiver's memory, the sender sends a message.
The receiver posts its receive when it knows the size, because MPI may crash in a receive that is too short.

A long block that fits its slot may be written or offered. Each sender chooses for itself, because ranks may have blocks
of different sizes. It compares the time that it takes to write to the slots with the time that its slowest receiver
takes to read an offered block. To read from a slot takes little time beside these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from mpiddp.faults.calls import NO_ROOT, BlockError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_message
from mpiddp.mpi.requests import All, Driven, Steps
from mpiddp.shm.eager import ADDRESS, BUFFERS, COST, SIZE, TAKEN, EagerBuffers, Round, SpinWait
from mpiddp.shm.segment import address_of
from mpiddp.typing import Array

from . import native
from .one_shot import Shot, whole
from .tags import Tag
from .ways import ATTACH, PIECES, Choice

_ALIGNED = 64
_CHOICE_BYTES = 1 << 16
"""A sender may offer blocks that are longer than this even if they fit their slots. It then writes their sizes as
negative numbers."""
_NO_BYTES = -1
"""The number that a receiver compares with the sender's if a block is too long for its slot. No sender writes this
number, so the two never match, and the receiver takes the block as an offered one."""
Cut = Callable[[Any], Sequence[Array]]
_Offer = tuple[int, int, Array]
"""An offered block: the position of the receiver's answer in the memory's words, the receiver, and the block."""
_NEVER_NS = 1 << 40
"""The time that a receiver writes for an offered block that had to be sent, so that the sender does not choose offers.
"""


class _Shown(NamedTuple):
    """How this rank passes its blocks in a round with one of the buffers. Positions are of words in the memory."""

    sizes: list[tuple[int, int]]
    """For each block and receiver, the position of the block's size, and the number that is written there."""
    written: list[tuple[int, slice]]
    """For each input that is written to its slot, the input's number and the slot's slice of the memory."""
    offered: list[tuple[int, int, int, int]]
    """For each offered input and receiver: the input's number, the receiver, the positions of offer and answer."""
    costs: list[int]
    """For offered blocks that would fit their slots: the positions where receivers write how many ns they took to read.
    """


class Blocks:
    """The blocks that one rank sends and receives in calls with arrays like ``inputs`` and ``outputs``.

    ``cuts`` has a function that makes a list of blocks from a call's output, and one for the input. It has None in
    place of a function if the output or the input is a list of blocks already.
    ``equal`` says that the outputs are equal rows of one array, and so are the inputs.
    """

    def __init__(
        self,
        link: Link,
        operation: str,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        root: int,
        cuts: tuple[Cut | None, Cut | None],
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
        slot = 0 if one_for_all else me
        self._own_input = slot if inputs and outputs else None
        self._own_output = 0 if operation == "scatter" else me
        """The numbers of the input and of the output for this rank's block to itself. The input's number is None if
        there is no such block."""
        sent: list[tuple[int, int, Sequence[int]]] = [
            (index, x.nbytes, ranks) for index, (x, ranks) in enumerate(zip(inputs, to, strict=bool(inputs)))
        ]
        most = {PIECES: self._slot_bytes, ATTACH: min(self._slot_bytes, _CHOICE_BYTES)}
        self.shown = {way: [self._shown_in(number, sent, most[way]) for number in range(BUFFERS)] for way in most}
        """For each way of long blocks that fit their slots, how this rank passes its blocks in each buffer."""
        self._choice = Choice(link) if self.shown[ATTACH][0].costs else None
        self._tries: list[tuple[str, int] | None] = [None] * BUFFERS
        """For each buffer, the way that its last call has tried, and the nanoseconds that this rank took; None if that
        call was no try."""
        self._received = [
            [
                (
                    index,
                    np.ndarray(x.shape if fits else 0, x.dtype, eager.memory, self._start(number, rank, slot)),
                    x.nbytes if fits else _NO_BYTES,
                    eager.position(SIZE, number, me, rank),
                    (rank, *(eager.position(kind, number, me, rank) for kind in (ADDRESS, TAKEN, COST))),
                )
                for index, (x, rank) in enumerate(zip(outputs, senders, strict=bool(outputs)))
                for fits in [x.nbytes <= self._slot_bytes]
                if rank != me
            ]
            for number in range(BUFFERS)
        ]
        """For each buffer, and for each block from another rank: the number of its output, its slot, its size or
        `_NO_BYTES`, and the position of the size that the sender writes. A tuple follows. It has the sender, and the
        positions of an offer, of the answer to it, and of the time that the receiver took to read."""
        # Each rank begins with the next one, so that not all read the same rank's memory at once.
        for received in self._received:
            received.sort(key=lambda each: (each[-1][0] - me) % link.size)
        self._tables: list[tuple[Array, Array, memoryview]] = []
        """For each buffer, the slots that this rank writes and those that it reads, each as one array, and the words in
        which all ranks write the sizes of their blocks for this one. The list is empty unless all blocks are short and
        of equal size."""
        if equal and inputs[0].nbytes <= most[ATTACH] >= outputs[0].nbytes:
            for number, each in enumerate(self.rounds):
                own = each.own.reshape(slots, -1)[:, : inputs[0].nbytes]
                mine = each.table.reshape(link.size, slots, -1)[:, me, : outputs[0].nbytes]
                told = eager.words[eager.position(SIZE, number, me, 0) :][: link.size]
                self._tables.append((own.view(inputs[0].dtype), mine.view(outputs[0].dtype), told))
        self._equal_sizes = [x.nbytes for x in outputs]
        self._requests: list[MPI.Request] = []
        self._offers: list[_Offer] = []
        self._block: Array | None = None
        """The block that this rank sends itself, from `show` until `take`."""
        self.awaited: SpinWait | None = eager.arrival if outputs else None
        if operation == "scatter":
            self.awaited = None if me == root else eager.arrival_of(root)

    def shot(self) -> Shot:
        return Shot(self.rounds, self.show, whole, None, self.awaited, self.take)

    def apart(self, given: Any, output: Any) -> Any:
        """Return the input, or a copy of it.

        A copy is needed if another rank may read the input, or MPI may send it, after this rank has written to an
        output that shares memory with it.
        """
        if isinstance(given, np.ndarray) and isinstance(output, np.ndarray) and not np.may_share_memory(given, output):
            return given
        if self._choice is not None and self._choice.way == PIECES and not self.shown[PIECES][0].offered:
            return given  # this call offers no block: all fit their slots, and the slots are the chosen way
        sent = [*given] if self._cut_input is None else [*self._cut_input(given)]
        if len(sent) > 1:
            del sent[self._link.rank]  # `take` copies this rank's own block before it writes to other outputs
        outputs = output if self._cut_output is None else self._cut_output(output)
        # There are few pairs to compare, because groups of more than `MAX_RANKS` ranks have no eager buffers.
        if not any(np.may_share_memory(x, y) for x in sent for y in outputs):
            return given
        return given.copy() if isinstance(given, np.ndarray) else [x.copy() for x in given]

    def _start(self, number: int, rank: int, slot: int) -> int:
        """Return where in the memory a slot of a rank's buffer begins."""
        start: int = self.rounds[number].place.start + (rank - self._link.rank) * self.eager.buffer_bytes
        return start + slot * self._slot_bytes

    def _shown_in(self, number: int, sent: list[tuple[int, int, Sequence[int]]], most_bytes: int) -> _Shown:
        """Return how this rank passes its blocks in rounds with a buffer, if blocks of over ``most_bytes`` are offered.

        ``sent`` has a tuple (number, bytes, receivers) for each input.
        """
        position, me, shown = self.eager.position, self._link.rank, _Shown([], [], [], [])
        for index, size_bytes, ranks in sent:
            others = [rank for rank in ranks if rank != me]
            fits, start = size_bytes <= self._slot_bytes, self._start(number, me, index)
            told_bytes = -size_bytes if most_bytes < size_bytes and fits else size_bytes
            shown.sizes.extend((position(SIZE, number, rank, me), told_bytes) for rank in ranks)
            if size_bytes <= most_bytes and others:
                shown.written.append((index, slice(start, start + size_bytes)))
            elif size_bytes > most_bytes:
                for rank in others:
                    shown.offered.append(
                        (index, rank, position(ADDRESS, number, rank, me), position(TAKEN, number, rank, me))
                    )
                    shown.costs.extend([position(COST, number, rank, me)] * fits)
        return shown

    def send(self, x: Array, rank: int) -> MPI.Request:
        return self._link.later.Isend(as_message(x, x.nbytes), rank, Tag.LONG_BLOCK)

    def show(self, given: Any) -> None:
        """Write this rank's blocks into the buffer of the next round, which must be writable.

        Long blocks may be offered or sent instead.
        """
        eager = self.eager
        buffer = (eager.number + 1) % BUFFERS
        way, start = PIECES, 0
        if self._choice is not None:
            way = self._choice.way or self._next_way(self._choice, buffer)
            self._choice.count()
            start = perf_counter_ns()
        shown = self.shown[way][buffer]
        if eager.told[buffer] is not shown:  # otherwise an earlier call has written the same sizes
            eager.told[buffer] = None  # an interrupt may leave some old sizes and some new ones
            for size, size_bytes in shown.sizes:
                eager.words[size] = size_bytes
            eager.told[buffer] = shown
        if self._tables:
            slots = self._tables[buffer][0]
            slots[...] = given.reshape(slots.shape)
            return
        inputs: Any = given if self._cut_input is None else self._cut_input(given)
        if self._own_input is not None:
            self._block = inputs[self._own_input]
        for index, place in shown.written:
            eager.memory[place] = inputs[index]  # this takes half the time of NumPy's assignment
        if shown.offered:
            self._offer(inputs, shown.offered)
        if self._choice is not None and self._tries[buffer]:
            self._tries[buffer] = way, perf_counter_ns() - start

    def _offer(self, inputs: Any, offered: list[tuple[int, int, int, int]]) -> None:
        """Write where long blocks lie. Send the blocks to ranks with which there is no cross-memory attach."""
        eager = self.eager
        for index, rank, address, taken in offered:
            x = inputs[index]
            if eager.reads(rank):
                eager.words[address] = address_of(x)
                self._offers.append((taken, rank, x))
            else:
                eager.words[address] = 0
                self._requests.append(self.send(x, rank))

    def _next_way(self, choice: Choice, buffer: int) -> str:
        """Return the chosen way, or the next one to try.

        If the last call in this buffer tried a way, note first how long it took: its receivers have written their times
        by now.
        """
        tried, self._tries[buffer] = self._tries[buffer], None
        if tried is not None and tried[1] >= 0:
            shown = self.shown[tried[0]][buffer]
            if self.eager.told[buffer] is shown:  # otherwise the times have been overwritten
                choice.note(tried[0], tried[1] + max((self.eager.words[cost] for cost in shown.costs), default=0))
        if choice.way is not None:
            self._tries = [None] * BUFFERS
            return choice.way
        way, tries = choice.next(self.shown)
        if tries:
            # There is no time yet (-1), because an interrupt may come before `show` has written the blocks.
            self._tries[buffer] = way, -1
        return way

    def take(self, current: Round, given: Any) -> Driven | None:
        """Copy the blocks that have arrived to the outputs; return an event if there is more to wait for, else None."""
        words, buffer, fault = self.eager.words, self.eager.number % BUFFERS, ""
        if self._tables:
            _, slots, told = self._tables[buffer]
            if told.tolist() == self._equal_sizes:
                given.reshape(slots.shape)[...] = slots
                return None
        outputs = given if self._cut_output is None else self._cut_output(given)
        if self._block is not None:  # it is copied first, because a block that has arrived may overwrite it
            outputs[self._own_output][...] = self._block
            self._block = None
        for index, slot, size_bytes, size, offer in self._received[buffer]:
            if words[size] == size_bytes:
                outputs[index][...] = slot
            else:
                wrong = self._take_long(outputs[index], words[size], *offer)
                fault = fault or wrong
        return self._left(fault) if fault or self._requests or self._offers else None

    def _left(self, fault: str) -> Driven | None:
        """Return the event of the answers and messages that this rank still waits for.

        It ends in BlockError if there is a ``fault``. Return None if there is nothing to wait for and no fault.
        """
        number, words = self.eager.number, self.eager.words
        offers, self._offers = [offer for offer in self._offers if words[offer[0]] != number], []
        requests, self._requests = self._requests, []
        return Driven(lambda: self._rest(number, requests, offers, fault)) if fault or requests or offers else None

    def _rest(self, number: int, requests: list[MPI.Request], offers: list[_Offer], fault: str) -> Steps:
        """Wait for the answers to offers, and for messages. Then raise BlockError if there is a ``fault``."""
        words = self.eager.words
        for taken, rank, x in offers:
            yield self.eager.spin_wait(lambda: abs(words[taken]) == number)  # noqa: B023 - called in this turn only
            if words[taken] < 0:
                requests.append(self.send(x, rank))
        yield All(requests)
        if fault:
            raise BlockError(fault)

    def _take_long(self, x: Array, sent_bytes: int, rank: int, address: int, taken: int, cost: int) -> str:
        """Take a block that is not in its slot or has an unexpected size; return what is wrong with it, or ''."""
        eager, words, fault = self.eager, self.eager.words, ""
        is_in_slot, sent_bytes = 0 <= sent_bytes <= self._slot_bytes, abs(sent_bytes)
        if sent_bytes != x.nbytes:
            fault = native.wrong_size(self._link, self._operation, rank, sent_bytes, x.nbytes)
            x = np.empty(sent_bytes, np.uint8)  # the message is received, so that the next call gets the right one
        if not is_in_slot:
            there, start = words[address], perf_counter_ns()
            if there and eager.read(rank, there, x):
                words[taken] = eager.number
            else:
                if there:
                    words[taken] = -eager.number
                self._requests.append(self._link.later.Irecv(as_message(x, sent_bytes), rank, Tag.LONG_BLOCK))
                start -= _NEVER_NS
            words[cost] = perf_counter_ns() - start
        return fault

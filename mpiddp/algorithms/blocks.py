"""Blocks through eager buffers: gather, scatter, all_to_all, and all_gather with lists, on one node.

Blocks may differ in size between ranks. In one round every sender writes, for each receiver, the size of its block and
the block itself. In place of a block that is longer than its slot of the buffer it writes where the block lies. The
receiver reads it there by cross-memory attach, and says so. If the receiver says that it cannot, or if the group has no
cross-memory attach, the sender sends a message. The receiver posts its receive when it knows the size, because MPI may
crash in a receive that is too short.

A long block that fits its slot may go either way. Each sender chooses for itself, because ranks may have blocks of
different sizes. It compares the time in which it writes to the slots with the time in which its slowest receiver reads
in place. Reading from a slot takes little time beside these.
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
"""Longer blocks may be offered even if they fit their slots. Their sizes are told as negative numbers then."""
_NO_BYTES = -1
"""The receiver expects this number if a block is too long for its slot. No sender tells it, so it never matches."""
Cut = Callable[[Any], Sequence[Array]]
_Offer = tuple[int, int, Array]
"""A block that its receiver may read: the position of the answer, the receiver, and the block."""
_NEVER_NS = 1 << 40
"""Stands for the time to read a block that had to be sent."""


class _Shown(NamedTuple):
    """How this rank's blocks go in a round with one of the buffers."""

    sizes: list[tuple[int, int]]
    """The position of each block's size, and the number that is told there."""
    written: list[tuple[int, slice]]
    """The numbers of the inputs that go into their slots, and their places in the memory."""
    offered: list[tuple[int, int, int, int]]
    """For each offered input and receiver: the input's number, the receiver, the positions of offer and answer."""
    costs: list[int]
    """For offered blocks that would fit their slots: the positions at which receivers tell how many ns they read."""


class Blocks:
    """The blocks that one rank sends and receives in calls with arrays like ``inputs`` and ``outputs``.

    ``cuts`` make lists of a call's output and input; None if they are lists already. ``equal`` says that the outputs
    are equal rows of one array, and so are the inputs.
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
        """The numbers of the input and of the output for this rank's block to itself, if there is one."""
        sent: list[tuple[int, int, Sequence[int]]] = [
            (index, x.nbytes, ranks) for index, (x, ranks) in enumerate(zip(inputs, to, strict=bool(inputs)))
        ]
        most = {PIECES: self._slot_bytes, ATTACH: min(self._slot_bytes, _CHOICE_BYTES)}
        self.shown = {way: [self._shown_in(number, sent, most[way]) for number in range(BUFFERS)] for way in most}
        """How this rank's blocks go: for each way of the long blocks that fit their slots, and for each buffer."""
        self._choice = Choice(link) if self.shown[ATTACH][0].costs else None
        self._tries: list[tuple[str, int] | None] = [None] * BUFFERS
        """For each buffer the way that its last call has tried, and the nanoseconds that this rank took."""
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
        """For each buffer, and each block from another rank: the number of its output, its slot, its size if that fits
        the slot, the position of the size that the sender tells; and in one tuple the sender, and the positions of an
        offer, of the answer to it, and of the time that reading took."""
        for received in self._received:  # not all read the same rank's memory at once
            received.sort(key=lambda each: (each[-1][0] - me) % link.size)
        self._tables: list[tuple[Array, Array, memoryview]] = []
        """For each buffer the slots of all blocks, to write and to read them at once, and the sizes that are told."""
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
        """What this rank sends itself."""
        self.awaited: SpinWait | None = eager.arrival if outputs else None
        if operation == "scatter":
            self.awaited = None if me == root else eager.arrival_of(root)

    def shot(self) -> Shot:
        return Shot(self.rounds, self.show, whole, None, self.awaited, self.take)

    def apart(self, given: Any, output: Any) -> Any:
        """Return the input, or a copy if it shares memory with the output and a message would see what is written."""
        if isinstance(given, np.ndarray) and isinstance(output, np.ndarray) and not np.may_share_memory(given, output):
            return given
        if self._choice is not None and self._choice.way == PIECES and not self.shown[PIECES][0].offered:
            return given  # nor is anything offered in the next call, because new tries begin in the slots
        sent = [*given] if self._cut_input is None else [*self._cut_input(given)]
        if len(sent) > 1:
            del sent[self._link.rank]  # this rank's own block is copied first
        outputs = output if self._cut_output is None else self._cut_output(output)
        # In pairs, of which there are few: larger groups than `MAX_RANKS` have no eager buffers.
        if not any(np.may_share_memory(x, y) for x in sent for y in outputs):
            return given
        return given.copy() if isinstance(given, np.ndarray) else [x.copy() for x in given]

    def _start(self, number: int, rank: int, slot: int) -> int:
        """Return where in the memory a slot of a rank's buffer begins."""
        start: int = self.rounds[number].place.start + (rank - self._link.rank) * self.eager.buffer_bytes
        return start + slot * self._slot_bytes

    def _shown_in(self, number: int, sent: list[tuple[int, int, Sequence[int]]], most_bytes: int) -> _Shown:
        """Return how this rank's blocks go in rounds with a buffer, if those of over ``most_bytes`` are offered.

        ``sent`` has a (number, bytes, receivers) for each input.
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

        Long blocks are offered or sent.
        """
        eager = self.eager
        buffer = (eager.number + 1) % BUFFERS
        way, start = PIECES, 0
        if self._choice is not None:
            way = self._choice.way or self._next_way(self._choice, buffer)
            self._choice.count()
            start = perf_counter_ns()
        shown = self.shown[way][buffer]
        if eager.told[buffer] is not shown:  # else the sizes stand there from an earlier call
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
            eager.memory[place] = inputs[index]  # half of the time of NumPy's assignment
        if shown.offered:
            self._offer(inputs, shown.offered)
        if self._choice is not None and self._tries[buffer]:
            self._tries[buffer] = way, perf_counter_ns() - start

    def _offer(self, inputs: Any, offered: list[tuple[int, int, int, int]]) -> None:
        """Tell where long blocks lie, or send them."""
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

        If the last call in this buffer tried a way, note first how long it took: its receivers have told their times.
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
            self._tries[buffer] = way, -1  # no time yet: an interrupt may come before `show` has written the blocks
        return way

    def take(self, current: Round, given: Any) -> Driven | None:
        """Copy the blocks that have arrived; return what is left to wait for."""
        words, buffer, fault = self.eager.words, self.eager.number % BUFFERS, ""
        if self._tables:
            _, slots, told = self._tables[buffer]
            if told.tolist() == self._equal_sizes:
                given.reshape(slots.shape)[...] = slots
                return None
        outputs = given if self._cut_output is None else self._cut_output(given)
        if self._block is not None:  # first, because an arriving block may overwrite it
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
        """Return what is left to wait for."""
        number, words = self.eager.number, self.eager.words
        offers, self._offers = [offer for offer in self._offers if words[offer[0]] != number], []
        requests, self._requests = self._requests, []
        return Driven(lambda: self._rest(number, requests, offers, fault)) if fault or requests or offers else None

    def _rest(self, number: int, requests: list[MPI.Request], offers: list[_Offer], fault: str) -> Steps:
        """Wait for the answers to offers, and for messages; a block of the wrong size is an error at the end."""
        words = self.eager.words
        for taken, rank, x in offers:
            yield self.eager.spin_wait(lambda: abs(words[taken]) == number)  # noqa: B023 - it is asked in this turn
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
            x = np.empty(sent_bytes, np.uint8)  # the message is received, so that the next is right
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

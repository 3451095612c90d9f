"""Two shots on device arrays through pinned memory that the ranks of a node share.

Every rank copies the slices of its array that other ranks add down to the host. It adds its own slice of all ranks'
arrays on its device, and copies the sum down for the others. As many bytes cross the bus as in a ring, but no rank
copies them from one part of the host's memory to another. MPI only sends tokens, which say that bytes are in the shared
memory. Several pieces are on their way at once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms import handshake
from mpiddp.algorithms.local_reduce import bounds, reduce_rows
from mpiddp.algorithms.tags import Tag
from mpiddp.device import array_namespace, pinned, stream, transfer
from mpiddp.faults.calls import UnknownCallError
from mpiddp.mpi import recorder
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import READY, All, Awaited, Steps
from mpiddp.shm import segment
from mpiddp.typing import Array

from . import staged_ring
from .ring import concurrent

LANES = 2
NODE_BYTES = 1 << 25
"""The memory of all ranks for one lane. On an H200, two lanes of this size took the least time on 2 and on 4 ranks."""
SHORTEST_BYTES = 1 << 20
"""The size of the shortest pieces. A shorter piece would take as long."""
_LINE_BYTES = 64


class Landing(Resource):
    """Memory that all ranks of a node map, pinned for the device of each.

    In each lane every rank has a slot for every rank. The slot for itself holds the sum of its slice, and the slot for
    another rank holds its addends of that rank's sum. The slots lie at the same places for pieces of all lengths,
    because a rank may still read the sum of one piece while the next one is written. A group that is given up leaves
    its memory pinned, because copies may be on their way.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unpin: Callable[[], None] | None = None
        self.slot_bytes = max(NODE_BYTES // link.size**2 // _LINE_BYTES, 1) * _LINE_BYTES
        self.slots: Array | None = None
        """All slots, as an array of shape (ranks, lanes, ranks, slot_bytes); None before `prepare`."""
        self.fault = ""
        """The reason why there is no memory; empty if there is some, and before `prepare`."""
        self.calls = 0

    def prepare(self, side: Any) -> Steps:
        """Allocate the memory on first use, and pin it on the device of a stream; return True if all ranks could.

        All ranks of the group call this together.
        """
        if self.slots is None and not self.fault:
            link = self._link
            used_bytes = LANES * link.size * self.slot_bytes
            region_bytes = -(-used_bytes // segment.ALIGNMENT_BYTES) * segment.ALIGNMENT_BYTES
            made: segment.Allocation = yield from segment.allocate(link.node, link, region_bytes)
            self.fault = made.fault
            if made.memory is not None:
                memory = np.frombuffer(made.memory, np.uint8)
                try:
                    with stream.on(side):
                        self._unpin = pinned.pin(memory)
                except OSError as error:
                    self.fault = str(error)
                failed = np.array([bool(self.fault)])
                yield link.later.Iallreduce(MPI.IN_PLACE, failed, MPI.LOR)
                if failed[0]:
                    self.close()
                else:
                    regions = memory.reshape(link.size, -1)[:, :used_bytes]
                    self.slots = regions.reshape(link.size, LANES, link.size, self.slot_bytes)
            # If memory is missing, all ranks know the reason, and rank 0 warns. A rank that cannot pin warns itself.
            if self.fault and (link.rank == 0 or made.memory is not None):
                recorder.warn(
                    f"in {link} long all_reduces on devices take the ring, which may be several times slower, because"
                    f" the ranks cannot share pinned memory: {self.fault}"
                )
            if self.slots is None:
                self.fault = self.fault or "another rank cannot pin it"
        return not self.fault

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self._unpin = self.slots = None  # these are the last references to the memory, which is unmapped then


class Lane:
    """A part of a call that reduces pieces, one after the other, on three streams.

    `_slots` holds this lane's slots of all ranks. Rank r writes its addends of rank q's sum to ``_slots[r][q]``, and
    the sum of its own slice to ``_slots[r][r]``.
    """

    def __init__(self, link: Link, index: int, sides: Sequence[Any], op: ReduceOp, factors: list[float] | None) -> None:
        landing = link[Landing]
        assert landing.slots is not None
        self._rank, self._size, self._link = link.rank, link.size, link
        self._others = [rank for rank in range(link.size) if rank != link.rank]
        self._slots, self._tag, self._op, self._factors = landing.slots[:, index], Tag.DEVICE_RING + index, op, factors
        self._add, self._down, self._up = sides
        self._token = landing.calls << 32

    def _meet(self) -> Steps:
        """Tell the other ranks that this rank's copies are done, and wait until they have told the same."""
        self._token += 1
        comm, told, heard = self._link.later, np.full(1, self._token), np.full(self._size, self._token)
        receives = [comm.Irecv(heard[rank : rank + 1], rank, self._tag) for rank in self._others]
        yield All([*receives, *(comm.Isend(told, rank, self._tag) for rank in self._others)])
        if (heard != self._token).any():
            rank = self._link.ranks[int((heard != self._token).argmax())]
            raise UnknownCallError(
                f"the ranks of {self._link} disagree: rank {rank} has left this all_reduce, perhaps by an error of its"
                " own, and is in another one; destroy the group, and make another"
            )

    def all_reduce(self, pieces: list[Array]) -> Steps:
        read: Awaited = READY
        for piece in pieces:
            read = yield from self._pass(piece, read)
        yield read

    def _pass(self, piece: Array, read: Awaited) -> Steps:
        """Reduce a piece; return the event at which this rank has copied the other ranks' sums.

        ``read`` is that event of the piece before. This rank waits for it before it meets the others, because they
        write their next sums after they have met.
        """
        edges = itertools.pairwise(bounds(piece.size, self._size, piece.itemsize))
        parts = [piece[start:end] for start, end in edges]
        mine = parts[self._rank]
        for other in self._others:
            transfer.down(self._slots[self._rank, other], parts[other], self._down)
        yield stream.mark(self._down)
        yield read
        yield from self._meet()
        with stream.on(self._add):
            rows = list(array_namespace(piece).empty((self._size, mine.size), piece.dtype))
        stream.follow(self._up, stream.mark(self._add))  # queued kernels may use the memory of rows
        for other in self._others:
            transfer.up(rows[other], self._slots[other, self._rank], self._up)
        stream.follow(self._add, stream.mark(self._up))
        rows[self._rank] = mine
        with stream.on(self._add):
            reduce_rows(self._op, rows, (mine,), self._size, self._factors)
        stream.follow(self._down, stream.mark(self._add))
        transfer.down(self._slots[self._rank, self._rank], mine, self._down)
        yield stream.mark(self._down)
        yield from self._meet()
        for other in self._others:
            transfer.up(parts[other], self._slots[other, other], self._up)
        return stream.mark(self._up)


def all_reduce(link: Link, call: Call, x: Array, op: ReduceOp) -> Steps:
    """Reduce ``x``. `staged_ring` does it on several nodes, and where memory cannot be shared or pinned."""
    begin = stream.ready(x)
    sides = add, down, _ = [stream.side(role, x) for role in ("add", "down", "up")]
    entries = yield from handshake.exchange(link, call, segment.NOWHERE, op)
    landing = link.resource(Landing)
    landing.calls += 1
    if not (link.one_node and (yield from landing.prepare(add))):
        yield begin  # the stream of the call; the ring would wait only for the stream that is current now
        yield from staged_ring.all_reduce(link.after(), x, op)
        return
    for side in (add, down):
        stream.follow(side, begin)
    flat, factors = x.reshape(-1), entries.factors_of(op)
    longest, shortest = landing.slot_bytes * link.size // x.itemsize, SHORTEST_BYTES // x.itemsize
    count = min(max(-(-x.size // LANES), shortest), longest)
    pieces = [flat[start : start + count] for start in range(0, x.size, count)]
    lanes = [Lane(link, index, sides, op, factors) for index in range(min(LANES, len(pieces)))]
    yield concurrent(functools.partial(lane.all_reduce, pieces[index::LANES]) for index, lane in enumerate(lanes))

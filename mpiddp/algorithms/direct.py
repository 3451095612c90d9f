"""Direct access: longer arrays of a node's ranks, moved where they lie, between two rounds of the eager buffers.

In the first round the ranks tell each other where their arrays lie. If these are symmetric, or if they go by
cross-memory attach, every rank then does its part of `two_shot` at once, and the second round is the barrier after it.
The other `ways` are steps: of `two_shot` through the scratch, and of MPI. A call of `two_shot` by attach takes longer,
because it makes anew what a plan has prepared here.

Ordinary arrays that are not too long may go by `one_shot` in pieces, and the first round has their first piece already.
A symmetric array is not copied there, so that the round is made again if only some are. So it is in a call that tries
pieces, whose time is that of all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from mpiddp.errors import DistError
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call
from mpiddp.mpi.requests import Awaited, Driven, Failed, Steps
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.eager import BUFFERS, EagerBuffers, Round
from mpiddp.shm.scratch import Scratch
from mpiddp.shm.segment import address_of, find, segment
from mpiddp.typing import Array

from . import native, two_shot
from .one_shot import ENOUGH, OneShot, Shot, apart, meeting, whole
from .peer_access import Copies, PeerAccess, Views
from .two_shot import Part
from .ways import ATTACH, MPIS, PIECES, SCRATCH, Ways

_ALWAYS_BYTES = 1 << 19
"""Up to this size ordinary arrays always go in pieces. The time of a try shows what a way costs, but not how long the
ranks wait for each other, which decides for short arrays."""
_WORD, _NUMBER = struct.Struct("q"), struct.Struct("d")
"""A factor is told in the bits of a whole number."""


class Direct:
    """The shots of a call with arrays like ``x``."""

    def __init__(
        self, link: Link, call: Call, operation: str, x: Array, op: Any, root: int, pieces: OneShot | None
    ) -> None:
        self._link, self._call, self._eager = link, call, link[EagerBuffers]
        self._operation, self._op, self._root = operation, op, root
        self._pieces = pieces
        """Takes ordinary arrays in pieces; None where they are too long for that."""
        self._way: str | None = None
        self._tries = False
        """The way of ordinary arrays in the call that is being made, and whether it is tried; None: not known yet."""
        self._first = pieces.shots[0] if pieces else meeting(self._eager)
        self._told = [
            [self._eager.position(kind, number, receiver, 0) for receiver in (0, 1) for kind in (0, 1)]
            for number in range(BUFFERS)
        ]
        """Where the first rank tells segment, offset, address and factor, by the buffer; the others do behind it."""
        self._ways, self._memory = link.resource(Ways), link.resource(CrossMemory)
        self._scratch = link.resource(Scratch)
        self._kind, self._size_bytes = two_shot.kind_of(call, x)._replace(in_pieces=pieces is not None), x.nbytes
        self._has_factor = op is not None and op.factor is not None
        self._x: Array | None = None

    def shots(self) -> Iterator[Shot]:
        yield Shot(self._first.rounds, self._show, whole, self._first.change, self._eager.all_arrived, self._act)
        yield meeting(self._eager)

    def apart(self, x: Array, output: Array) -> Array:
        """Return the input, or a copy if the output lies where other ranks read."""
        part, all_of_it = (x, output) if self._operation == "all_gather" else (output, x)
        return x.copy() if two_shot.lies_in_others(part, all_of_it, self._link.rank) else x

    def _show(self, x: Array) -> Array | None:
        """Tell where the array lies; return the piece of an ordinary one that the next round shows."""
        self._x = x
        self._way, self._tries = self._decide()
        place = find(x)
        buffer = (self._eager.number + 1) % BUFFERS
        words, me, told = self._eager.words, self._link.rank, self._told[buffer]
        self._eager.told[buffer] = None  # the sizes of blocks that stood here are overwritten
        words[told[0] + me] = place.segment
        if self._way == PIECES and not self._tries and not place.segment:
            return None if self._first.shown is None else self._first.shown(x)
        words[told[1] + me], words[told[2] + me] = place.offset, address_of(x)
        if self._has_factor:
            words[told[3] + me] = _WORD.unpack(_NUMBER.pack(self._op.factor))[0]
        return None

    def _act(self, current: Round, output: Array) -> Awaited | None:
        """Do this rank's part; return what is left to wait for."""
        x, self._x = self._x, None
        assert x is not None, "it has been shown"
        words, link, told = self._eager.words, self._link, self._told[self._eager.number % BUFFERS]
        segments = words[told[0] : told[0] + link.size].tolist()
        symmetric = segments[0] and len(set(segments)) == 1
        way, tries = self._way, self._tries
        if way == PIECES and not symmetric:
            left = self._by_pieces(current, output, x, shown=not (tries or any(segments)))
            return Driven(lambda: self._ways.timed(self._kind, PIECES, (left,))) if tries else left
        part = Part(self._operation, link, output, x, self._op, self._root)
        flat = part.flat()
        offsets, addresses, factors_told = (words[first : first + link.size].tolist() for first in told[1:])
        factors = [_NUMBER.unpack(_WORD.pack(each))[0] for each in factors_told] if self._has_factor else None
        access: PeerAccess
        if symmetric:
            view, places = segment(segments[0]).view, zip(link.ranks, offsets, strict=True)
            access = Views([view(rank, offset, flat.size, flat.dtype) for rank, offset in places], link.rank)
        elif way == ATTACH:
            access = Copies(self._memory, link.rank, flat, addresses)
            if tries:
                return Driven(lambda: self._ways.timed(self._kind, ATTACH, _moved(part, access, factors)))
        else:
            steps = self._go(part, way)
            return Driven(lambda: self._ways.timed(self._kind, way, steps) if tries and way else steps)
        try:
            part.move(access, factors)
        except DistError as error:
            return Failed(error)
        return None

    def _by_pieces(self, current: Round, output: Array, x: Array, *, shown: bool) -> Awaited:
        """Make the shots of ordinary arrays, of which ``current`` has ``shown`` the first pieces, or has not."""
        pieces, first = self._pieces, int(shown)
        assert pieces is not None
        if output is not x and len(pieces.shots) > first:
            x = apart(x, output)
        if shown and self._first.end is not None:
            self._first.end(current, self._first.result(output))
        if len(pieces.shots) == first:
            return ENOUGH
        return Driven(lambda: pieces.shoot(output, x, self._call.record.pack(0), first))

    def _decide(self) -> tuple[str | None, bool]:
        """Return the way of ordinary arrays, and whether this call tries it; None before there is memory for all.

        It counts the call before its round begins. Later, a rank that an interrupt takes out of the call would not
        count it, where the others do.
        """
        if self._pieces is not None and (self._size_bytes <= _ALWAYS_BYTES or self._has_factor):
            return PIECES, False
        chosen = self._ways.chosen(self._kind)
        if chosen is not None:
            if chosen != SCRATCH or self._pieces is not None:  # `two_shot` counts the others
                self._ways.count(self._kind)
            return chosen, False
        possible = self._possible()
        return (self._ways.next(self._kind, possible), True) if possible else (None, False)

    def _possible(self) -> list[str]:
        """Return the ways of ordinary arrays; none before the first call has asked for their memory."""
        ways = {
            PIECES: self._pieces is not None,
            SCRATCH: self._scratch.ready,
            ATTACH: not self._memory.fault,
            MPIS: self._op is None and self._size_bytes >= two_shot.MPIS_BYTES,
        }
        possible = [way for way, is_possible in ways.items() if is_possible and self._memory.asked]
        return [] if possible == [MPIS] else possible

    def _go(self, part: Part, way: str | None) -> Steps:
        """Go by MPI or through the scratch."""
        link = part.link.after()
        if way == MPIS:
            yield from part.by(native, link)
        else:
            yield from self._memory.prepare()
            yield from part.by(two_shot, link, self._call, way=SCRATCH)  # by MPI where there is no scratch


def _moved(part: Part, access: PeerAccess, factors: list[float] | None) -> Steps:
    part.move(access, factors)
    yield from ()

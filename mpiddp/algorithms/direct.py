"""Direct access: ranks of a node read and write each other's longer arrays between two rounds of the eager buffers.

In the first round the ranks tell each other where their arrays lie. If these are symmetric, or if they go by
cross-memory attach, every rank then does its part of `two_shot` at once, and the second round is the barrier after it.
The other `ways` need no second round: pieces by `one_shot`, the scratch by `two_shot`, and MPI's own operation. A call
of `two_shot` itself takes longer by attach, because it prepares in each call what this module prepares once in a plan.

Arrays that are not in symmetric memory are called ordinary. If these go in pieces, the first round carries the first
pieces already. A symmetric array is not copied, so if only some ranks have one, another round carries the first pieces.
A call that tries pieces makes another round, too, because the time of all pieces has to be measured.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import MAX_COUNT, counted, plain
from mpiddp.mpi.operation import Call
from mpiddp.mpi.requests import READY, Awaited, Driven, Failed, Steps
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

_SCRATCH_BYTES = 1 << 19
"""Arrays that may go in pieces do not go through the scratch if they are shorter than this."""
_WORD, _NUMBER = struct.Struct("q"), struct.Struct("d")
"""The formats by which a factor, a float, is written to a word of the memory, which is an integer."""


class Direct:
    """The shots of a call with arrays like ``x``."""

    def __init__(
        self, link: Link, call: Call, operation: str, x: Array, op: Any, root: int, pieces: OneShot | None
    ) -> None:
        self._link, self._call, self._eager = link, call, link[EagerBuffers]
        self._operation, self._op, self._root = operation, op, root
        self._pieces = pieces
        """The call for ordinary arrays that go in pieces; None if they are too long for that, or if an algorithm was
        asked for."""
        self._way: str | None = None
        self._tries = False
        """`_way` is the way of ordinary arrays in the current call; None before the ways are prepared. `_tries` is True
        if the call tries this way."""
        self._first = pieces.shots[0] if pieces else meeting(self._eager)
        self._meeting = OneShot(link, call, [meeting(self._eager)])
        self._told = [
            [self._eager.position(kind, number, receiver, 0) for receiver in (0, 1) for kind in (0, 1)]
            for number in range(BUFFERS)
        ]
        """For each buffer, the positions where rank 0 tells its segment, offset, address and factor. The words of the
        other ranks follow in order."""
        self._choice = link.resource(Ways).of(two_shot.kind_of(call, x)._replace(of_direct=1 + (pieces is not None)))
        self._memory = link.resource(CrossMemory)
        self._has_factor = op is not None and op.factor is not None
        self._scratch = link.resource(Scratch) if pieces is None or x.nbytes >= _SCRATCH_BYTES else None
        self._is_plain = plain(x) and x.size * link.size <= MAX_COUNT
        """True if MPI's own operations take the arrays as they are."""
        self._possible: list[str] | None = None
        """The ways that this group can take; None before they are prepared."""
        self._x: Array | None = None

    def shots(self) -> Iterator[Shot]:
        yield Shot(self._first.rounds, self._show, whole, self._first.write, self._eager.arrival, self._act)
        yield from self._meeting.shots

    def apart(self, x: Array, output: Array) -> Array:
        """Return the input, or a copy of it if this rank's output overlaps parts of the input that other ranks read."""
        if x.flags.owndata and output.flags.owndata:
            return x
        part, all_of_it = (x, output) if self._operation == "all_gather" else (output, x)
        return x.copy() if two_shot.lies_in_others(part, all_of_it, self._link.rank) else x

    def _show(self, x: Array) -> Array | None:
        """Write where the array lies; return the piece of it that the next round carries, or None."""
        self._x = x
        self._way, self._tries = self._decide()
        place = find(x)
        buffer = (self._eager.number + 1) % BUFFERS
        words, me, told = self._eager.words, self._link.rank, self._told[buffer]
        self._eager.told[buffer] = None  # this overwrites the block sizes of earlier calls
        words[told[0] + me] = place.segment
        if self._way == PIECES and not self._tries and not place.segment:
            return None if self._first.shown is None else self._first.shown(x)
        words[told[1] + me], words[told[2] + me] = place.offset, address_of(x)
        if self._has_factor:
            words[told[3] + me] = _WORD.unpack(_NUMBER.pack(self._op.factor))[0]
        return None

    def _act(self, current: Round, output: Array) -> Awaited | None:
        """Do this rank's part; return the event that is left to wait for, or None if the second round follows."""
        x, self._x = self._x, None
        assert x is not None, "it has been shown"
        words, link, told = self._eager.words, self._link, self._told[self._eager.number % BUFFERS]
        segments = words[told[0] : told[0] + link.size].tolist()
        way, tries = self._way, self._tries
        if segments[0] and segments.count(segments[0]) == link.size:
            return self._move(output, x, told, segments[0])
        if tries or way in (None, SCRATCH):
            steps = self._go(way, output, x, told)
            return Driven(lambda: self._choice.timed(way, steps) if tries and way else steps)
        if way == ATTACH:
            return self._move(output, x, told)
        if way == PIECES:
            return self._by_pieces(output, x, None if any(segments) else current)
        return self._by_mpi(output, x)

    def _move(self, output: Array, x: Array, told: list[int], number: int = 0) -> Failed | None:
        """Do this rank's part where the arrays lie: in segment ``number``, or if that is 0 in the ranks' own memory."""
        words, link = self._eager.words, self._link
        part = Part(self._operation, link, output, x, self._op, self._root)
        flat, factors = part.flat(), None
        access: PeerAccess
        if number:
            view, offsets = segment(number).view, words[told[1] : told[1] + link.size].tolist()
            places = zip(link.ranks, offsets, strict=True)
            access = Views([view(rank, offset, flat.size, flat.dtype) for rank, offset in places], link.rank)
        else:
            access = Copies(self._memory, link.rank, flat, words[told[2] : told[2] + link.size].tolist())
        if self._has_factor:
            factors = [_NUMBER.unpack(_WORD.pack(each))[0] for each in words[told[3] : told[3] + link.size].tolist()]
        try:
            part.move(access, factors)
        except DistError as error:
            return Failed(error)
        return None

    def _by_pieces(self, output: Array, x: Array, shown: Round | None) -> Awaited:
        """Make the shots of ordinary arrays; ``shown`` is this round if it carries the first pieces, else None."""
        pieces, first = self._pieces, int(shown is not None)
        assert pieces is not None
        if output is not x and len(pieces.shots) > first:
            x = apart(x, output)
        if shown is not None and self._first.end is not None:
            self._first.end(shown, self._first.result(output))
        if len(pieces.shots) == first:
            return ENOUGH
        return Driven(lambda: pieces.shoot(output, x, self._eager.call, first))

    def _by_mpi(self, output: Array, x: Array) -> Awaited:
        link = self._link
        if not self._is_plain:
            part = Part(self._operation, link.after(), output, x, root=self._root)
            return Driven(lambda: part.by(native, part.link))
        if output is x:
            return link.later.Ibcast(counted(x), self._root)
        return link.later.Iallgather(counted(x.copy() if np.may_share_memory(x, output) else x), output)

    def _decide(self) -> tuple[str | None, bool]:
        """Return the way of ordinary arrays, and whether this call tries it; None before the ways are prepared.

        The call is counted before its round begins. If it were counted later, a rank that an interrupt takes out of
        the call would not count it, and the others would.
        """
        if self._pieces is not None and self._has_factor:
            return PIECES, False
        chosen = self._choice.way
        if chosen is not None:
            self._choice.count()
            return chosen, False
        if self._possible is None:
            if not (self._memory.asked and (self._scratch is None or self._scratch.ready or self._scratch.fault)):
                return None, False
            ways = {
                PIECES: self._pieces is not None,
                SCRATCH: self._scratch is not None and self._scratch.ready,
                ATTACH: not self._memory.fault,
                MPIS: self._op is None,
            }
            self._possible = [way for way, is_possible in ways.items() if is_possible]
        return self._choice.next(self._possible) if self._possible else (SCRATCH, False)

    def _go(self, way: str | None, output: Array, x: Array, told: list[int]) -> Steps:
        """Take a way that needs several steps, or try a way. The time of a try begins when all ranks have come."""
        if way is None:
            yield from self._memory.prepare()
            if self._scratch is not None:
                yield from self._scratch.prepare()
            way = SCRATCH if self._pieces is None else PIECES
        if way == PIECES:
            yield self._by_pieces(output, x, None)
        elif way == ATTACH:
            yield self._move(output, x, told) or READY
            yield from self._meeting.shoot(None, None, self._eager.call)
        elif way == MPIS:
            yield self._by_mpi(output, x)
        else:
            part = Part(self._operation, self._link.after(), output, x, self._op, self._root)
            yield from part.by(two_shot, part.link, self._call, way=SCRATCH)  # it takes another way without a scratch

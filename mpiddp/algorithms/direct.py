"""Direct access: longer arrays of a node's ranks, moved where they lie, between two rounds of the eager buffers.

In the first round the ranks tell each other where their arrays lie. If these are symmetric, or if they go by
cross-memory attach, every rank then does its part of `two_shot` at once, and the second round is the barrier after it.
The other `ways` are steps: of `two_shot` through the scratch, and of MPI. A call of `two_shot` by attach takes longer,
because it makes anew what a plan has prepared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.faults.calls import NO_ROOT
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.operation import Call
from mpiddp.mpi.requests import Awaited, Driven, Failed, Steps
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.eager import BUFFERS, EagerBuffers, Round
from mpiddp.shm.scratch import Scratch
from mpiddp.shm.segment import address_of, find, segment
from mpiddp.typing import Array

from . import native, two_shot
from .one_shot import Shot, meeting, whole
from .peer_access import Copies, PeerAccess, Views
from .ways import ATTACH, MPIS, SCRATCH, Ways


class Direct:
    """The shots of a call with arrays like ``x``."""

    def __init__(self, link: Link, call: Call, operation: str, x: Array, op: Any, root: int) -> None:
        self._link, self._call, self._eager = link, call, link[EagerBuffers]
        self._operation, self._op, self._root = operation, op, root
        self._options = [each for each in (root, op) if each not in (NO_ROOT, None)]
        self._rounds = self._eager.rounds((4,), np.dtype(np.int64))
        self._ways, self._memory = link.resource(Ways), link.resource(CrossMemory)
        self._scratch = link.resource(Scratch)
        self._kind, self._size_bytes = two_shot.kind_of(call, x), x.nbytes
        self._has_factor = op is not None and op.factor is not None
        self._x: Array | None = None

    def shots(self) -> Iterator[Shot]:
        yield Shot(self._rounds, self._show, whole, None, self._eager.all_arrived, self._act)
        yield meeting(self._eager)

    def apart(self, x: Array, output: Array) -> Array:
        """Return the input, or a copy if the output lies where other ranks read."""
        part, all_of_it = (x, output) if self._operation == "all_gather" else (output, x)
        return x.copy() if two_shot.lies_in_others(part, all_of_it, self._link.rank) else x

    def _show(self, x: Array) -> None:
        """Tell where the array lies, in the buffer of the next round."""
        self._x = x
        place = find(x)
        words = self._rounds[(self._eager.number + 1) % BUFFERS].own
        words[0], words[1], words[2] = place.segment, place.offset, address_of(x)
        if self._has_factor:
            words.view(np.float64)[3] = self._op.factor

    def _act(self, current: Round, output: Array) -> Awaited | None:
        """Do this rank's part; return what is left to wait for."""
        x, self._x = self._x, None
        assert x is not None, "it has been shown"
        link, flat = self._link, as_bytes(x) if self._op is None else x.reshape(-1)
        segments, offsets, addresses, _ = current.table.T.tolist()
        factors = current.table[:, 3].copy().view(np.float64).tolist() if self._has_factor else None
        access: PeerAccess
        chosen = way = started = None
        if segments[0] and len(set(segments)) == 1:
            view, places = segment(segments[0]).view, zip(link.ranks, offsets, strict=True)
            access = Views([view(rank, offset, flat.size, flat.dtype) for rank, offset in places], link.rank)
        else:
            chosen = self._ways.chosen(self._kind)
            if chosen is None:
                possible = self._possible()
                way = self._ways.next(self._kind, possible) if possible else None
            elif chosen != SCRATCH:  # which `two_shot` counts
                self._ways.count(self._kind)
            if (chosen or way) != ATTACH:
                return Driven(lambda: self._go(link.after(), chosen, way, output, x))
            access = Copies(self._memory, link.rank, flat, addresses)
            started = thread_time() if way else None
        try:
            self._move(access, output, x, factors)
        except DistError as error:
            return Failed(error)
        if started is None:
            return None
        seconds = thread_time() - started
        return Driven(lambda: self._ways.note(self._kind, ATTACH, seconds))

    def _possible(self) -> list[str]:
        """Return the ways of ordinary arrays; none before the first call has asked for their memory."""
        ways = []
        if self._scratch.ready and self._memory.asked:
            ways.append(SCRATCH)
        if self._memory.asked and not self._memory.fault:
            ways.append(ATTACH)
        if ways and self._op is None and self._size_bytes >= two_shot.MPIS_BYTES:
            ways.append(MPIS)
        return ways

    def _go(self, link: Link, chosen: str | None, tried: str | None, output: Array, x: Array) -> Steps:
        """Go another way than attach, and if it is ``tried`` note the time."""
        started = thread_time()
        arrays = (output, x) if self._operation in ("reduce_scatter", "all_gather") else (x,)
        if MPIS in (chosen, tried):
            yield from getattr(native, self._operation)(link, *arrays, *self._options)
        else:
            yield from self._memory.prepare()
            steps = getattr(two_shot, self._operation)  # by MPI where there is no scratch
            yield from steps(link, self._call, *arrays, *self._options, way=SCRATCH)
        if tried is not None:
            yield from self._ways.note(self._kind, tried, thread_time() - started)

    def _move(self, access: PeerAccess, output: Array, x: Array, factors: list[float] | None) -> None:
        match self._operation:
            case "all_reduce" | "reduce":
                two_shot.reduce_slice(self._link, x, self._op, self._root, access, factors)
            case "reduce_scatter":
                two_shot.reduce_block(self._link, output, self._op, access, factors)
            case "all_gather":
                access.gather(as_bytes(output).reshape(self._link.size, -1))
            case _:
                access.spread(self._root)

"""Ways of ordinary arrays within a node: pieces in eager buffers, the scratch, cross-memory attach, or MPI.

The fastest way depends on the processor, the kernel and the pages of the arrays, and most of all on the cores: if they
have no cache in common, writing to a buffer that another core has read takes many times as long. Therefore the first
calls of an operation with arrays of a size take one way after the other, and then all ranks agree on one. A way is
judged by processor time, because other load prolongs a call, but hardly its work.

The choice must not change a result. So MPI's own operation is no way of a reduction, because it may give other bits
than the other ways, which all give the same. For a PREMUL_SUM the size alone decides about pieces: in pieces the
addends are scaled, and in the other ways the sum, if all ranks have the same power of two as their factor. That gives
other bits where numbers underflow.

`two_shot` has a choice only if all ranks block in the call. Its other calls go through the scratch, which a rank fills
when the call's turn has come. A program may have begun several calls on one array. By attach a rank might read another
rank's array before that rank's earlier call has written to it. `direct` begins every call when its turn has come, so it
always has a choice, and pieces as one more way. In `blocks` each rank chooses for itself, by the time that calls take.
"""

from collections.abc import Collection, Iterable, Mapping
from time import thread_time
from typing import NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Awaited, Steps
from mpiddp.typing import Array

PIECES, SCRATCH, ATTACH, MPIS = "pieces", "scratch", "attach", "native"
TRIES = 6
"""How many calls try each way. They follow one another, as later calls of that way will. The least time counts."""
WARM_UPS = 4
"""How many calls go in pieces before the tries. A buffer that no other core has read yet is written faster than ever
again."""
FEW_CALLS, MANY_CALLS = 250, 4000
"""How many calls a choice lasts before the ways are tried again, because other load may have falsified the last tries.
A new choice lasts for `FEW_CALLS`. One that is confirmed lasts twice as long as before, up to `MANY_CALLS`."""
LEAD = 0.95
"""The share of the first way's time that another way must stay below to be chosen, so that chance does not choose."""


class Kind(NamedTuple):
    """A kind of calls, which all go the same way."""

    operation: str
    bits: int
    """The bit length of the arrays' size in bytes: sizes between two powers of two are one kind."""
    of_direct: int = 0
    """0 for calls of `two_shot`, 1 for calls of `direct`, 2 for calls of `direct` that may go in pieces. They have
    different ways to choose from."""


class Choice:
    """The way of calls of one kind."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.way: str | None = None
        """The chosen way; None while the ways are tried."""
        self._last = ""
        self._lasts_calls = self._calls_left = self._warm_ups = 0
        self._took: dict[str, list[float]] = {}

    def run(self, possible: Mapping[str, Steps], way: str | None) -> Steps:
        """Run the steps of ``way`` if that is possible, else of the only possible way or of the chosen one. Collective.

        If several ways are possible and none is chosen yet, try one of them.
        """
        way = way if way in possible else next(iter(possible)) if len(possible) == 1 else self.way
        if way is None:
            tried, _ = self.next(possible)
            yield from self.timed(tried, possible[tried])
        else:
            self.count()
            yield from possible[way]

    def count(self) -> None:
        """Count a call that goes the chosen way. After the last call of a choice the ways are tried again."""
        self._calls_left -= 1
        if self._calls_left == 0:
            self.way = None

    def next(self, possible: Collection[str]) -> tuple[str, bool]:
        """Return the way that a call tries, and True. For a call before the tries, return pieces and False."""
        if PIECES in possible and self._warm_ups < WARM_UPS:
            self._warm_ups += 1
            return PIECES, False
        return min(possible, key=lambda way: len(self._took.setdefault(way, [])) >= TRIES), True

    def timed(self, way: str, steps: Iterable[Awaited]) -> Steps:
        """Try a way, note its processor time, and choose after the last try. Collective."""
        start = thread_time()
        yield from steps
        least = self._noted(way, thread_time() - start)
        if least is not None:
            yield self._link.later.Iallreduce(MPI.IN_PLACE, least, MPI.MAX)
            self._choose(least)

    def note(self, way: str, took: float) -> None:
        """Note how long a try has taken, and choose after the last one, without the other ranks."""
        if way in self._took:
            least = self._noted(way, took)
            if least is not None:
                self._choose(least)

    def _noted(self, way: str, took: float) -> Array | None:
        """Note a try; return the least time of each way after the last one."""
        self._took[way].append(took)
        every = self._took.values()
        return np.array([min(times) for times in every]) if min(map(len, every)) >= TRIES else None

    def _choose(self, least: Array) -> None:
        least[0] *= LEAD
        self.way = list(self._took)[int(least.argmin())]
        is_new = self.way != self._last
        self._lasts_calls = FEW_CALLS if is_new else min(2 * self._lasts_calls, MANY_CALLS)
        self._last, self._calls_left = self.way, self._lasts_calls
        self._took, self._warm_ups = {}, 0


class Ways(Resource):
    """A group's choices, one for each kind of calls."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._choices: dict[Kind, Choice] = {}

    def of(self, kind: Kind) -> Choice:
        return self._choices.setdefault(kind, Choice(self._link))

    def described(self) -> dict[str, str]:
        """Return, for each operation, a text of the ways that the ranks have agreed on, by the size of the arrays."""
        found: dict[str, list[str]] = {}
        chosen = {kind: choice.way for kind, choice in sorted(self._choices.items()) if choice.way}
        for kind, way in chosen.items():
            if kind.of_direct < 2 and kind._replace(of_direct=kind.of_direct + 1) in chosen:
                # Calls that asked for an algorithm, and arrays too long for pieces, may have a choice of their own for
                # a size that other calls have, too. The text is of those other calls.
                continue
            limit = 1 << kind.bits
            size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit >> 10} KiB"
            found.setdefault(kind.operation, []).append(f"{way} (below {size})")
        return {operation: ", ".join(texts) for operation, texts in found.items()}

"""Ways of ordinary arrays within a node: through the scratch, or by cross-memory attach.

Which one is faster depends on the processor, the kernel and the pages of the arrays. Therefore the first calls of an
operation with arrays of a size take the ways in turn, and then all ranks agree on one. Reductions have the same bits
either way.

A way is judged by the processor time that a rank's own steps take, because other load and late ranks prolong waits, but
hardly the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import thread_time
from typing import TypeAlias

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.requests import Steps

SCRATCH, ATTACH = "scratch", "attach"
TRIES = 3
"""Calls that take each way. The least time counts."""
LEAD = 0.9
"""Attach has to take less than this of the scratch's time: short arrays need a barrier more."""

Kind: TypeAlias = tuple[str, int]
"""An operation, and the number of bits of the arrays' length in bytes."""


class Ways(Resource):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._chosen: dict[Kind, str] = {}
        self._took: dict[Kind, dict[str, list[float]]] = {}
        self.chosen = self._chosen.get

    def run(self, kind: Kind, possible: Mapping[str, Steps], way: str | None) -> Steps:
        """Run the steps of ``way``, of the only possible or of the chosen one; else try one. Collective."""
        way = way if way in possible else next(iter(possible)) if len(possible) == 1 else self._chosen.get(kind)
        if way is None:
            yield from self._try(kind, possible)
        else:
            yield from possible[way]

    def _try(self, kind: Kind, possible: Mapping[str, Steps]) -> Steps:
        took = self._took.setdefault(kind, {way: [] for way in possible})
        way = min(took, key=lambda each: len(took[each]))
        spent, start = 0.0, thread_time()
        for awaited in possible[way]:
            spent += thread_time() - start
            yield awaited
            start = thread_time()
        took[way].append(spent + thread_time() - start)
        if min(map(len, took.values())) == TRIES:
            least = np.array([min(took[SCRATCH]), min(took[ATTACH])])
            yield self._link.later.Iallreduce(MPI.IN_PLACE, least, MPI.MAX)
            self._chosen[kind] = ATTACH if least[1] < LEAD * least[0] else SCRATCH
            del self._took[kind]

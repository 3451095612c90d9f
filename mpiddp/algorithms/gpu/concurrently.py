"""Several steps at once: while one of them waits, the others go on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpiddp.mpi.work import Awaited, Steps


class Any:
    """Several things that are waited for, of which one is enough."""

    __slots__ = ("_awaited",)

    def __init__(self, awaited: Sequence[Awaited]) -> None:
        self._awaited = awaited

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Tell whether one of them has happened, and help all of them on."""
        return bool(sum([each.Test() for each in self._awaited]))

    def Wait(self) -> None:  # noqa: N802
        """Block until one of them has happened."""
        while not self.Test():
            os.sched_yield()


def abreast(lanes: Sequence[Steps]) -> Steps:
    """Run all of ``lanes`` to their ends, each as far as it goes without waiting.

    All of it is one operation, at the head of its group's queue: what lanes send to each other's counterparts has to
    be told apart by tags, because lanes overtake each other, differently on each rank.
    """
    waiting: dict[int, Awaited] = {}
    ready = list(range(len(lanes)))
    while True:
        for lane in ready:
            try:
                waiting[lane] = next(lanes[lane])
            except StopIteration:
                waiting.pop(lane, None)
        if not waiting:
            return
        yield Any(list(waiting.values()))
        ready = [lane for lane, awaited in waiting.items() if awaited.Test()]

"""Several generators at once: while one waits, the others go on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpiddp.mpi.requests import Awaited, Steps


class AnyOf:
    __slots__ = ("_awaited",)

    def __init__(self, awaited: Sequence[Awaited]) -> None:
        self._awaited = awaited

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return bool(sum([each.Test() for each in self._awaited]))

    def Wait(self) -> None:  # noqa: N802
        while not self.Test():
            os.sched_yield()


def run_concurrently(generators: Sequence[Steps]) -> Steps:
    """Run all to their ends, as one operation.

    They overtake each other: their messages need tags of their own.
    """
    waiting: dict[int, Awaited] = {}
    ready = list(range(len(generators)))
    while True:
        for index in ready:
            try:
                waiting[index] = next(generators[index])
            except StopIteration:
                waiting.pop(index, None)
        if not waiting:
            return
        yield AnyOf(list(waiting.values()))
        ready = [index for index, awaited in waiting.items() if awaited.Test()]

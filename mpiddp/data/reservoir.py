"""The policies of a `Stream`, which choose the samples to draw and the samples to drop.

`Reservoir` draws at random, `Fifo` in the order of arrival. They hold the numbers of slots in memory, not the samples.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np


class Fifo:
    """Draw slots in the order of their arrival, each once; a slot leaves when it is drawn."""

    def __init__(self, seed: int = 0) -> None:
        self.slots: list[int] = []
        self.seen = 0
        """Number of slots, at the front of ``slots``, that have been drawn and are still held."""
        self._random = random.Random(seed)

    def add(self, slots: Sequence[int]) -> None:
        self.slots += slots

    def evict(self) -> int | None:
        """Remove a slot that has been drawn, and return it. Return None if no slot held has been drawn."""
        return None

    def draw(self, count: int, last: bool) -> tuple[list[int], list[int]]:
        """Return up to ``count`` slots, and the slots among them that leave.

        ``last`` is True when no more samples arrive.
        """
        taken, self.slots = self.slots[:count], self.slots[count:]
        return taken, taken

    def ready(self, count: int, min_fill: int) -> bool:
        """Return True if ``count`` slots can be drawn while more samples are still to come."""
        return len(self.slots) >= max(count, min_fill)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "random": np.array(self._random.getstate()[1], np.uint64)}

    def load_state_dict(self, state: dict[str, Any], slots: list[int]) -> None:
        """Continue from ``state``; ``slots`` have the samples that were held when it was saved."""
        self.slots, self.seen = slots, int(state["seen"])
        self._random.setstate((3, tuple(int(each) for each in state["random"]), None))


class Reservoir(Fifo):
    """Draw slots at random, each with the same chance and possibly several times.

    If more samples arrive than fit, `evict` removes a slot at random among those that were drawn. No slot leaves before
    it was drawn. When no more samples arrive, each draw removes its slot.

    References
    ----------
    Meyer et al., High throughput training of deep surrogates from large ensemble runs (SC23, arXiv 2309.16743).
    """

    def evict(self) -> int | None:
        return self._remove(int(self._random.random() * self.seen)) if self.seen else None

    def _remove(self, at: int) -> int:
        # Drawn slots are at the front. The last drawn slot fills the gap, and the last slot of all fills its place.
        slots = self.slots
        slot = slots[at]
        if at < self.seen:
            self.seen -= 1
            slots[at] = slots[self.seen]
            at = self.seen
        slots[at] = slots[-1]
        slots.pop()
        return slot

    def draw(self, count: int, last: bool) -> tuple[list[int], list[int]]:
        chance, slots = self._random.random, self.slots
        if last:
            taken = [self._remove(int(chance() * len(slots))) for _ in range(min(count, len(slots)))]
            return taken, taken
        taken = []
        for _ in range(count):
            at = int(chance() * len(slots))
            taken.append(slots[at])
            if at >= self.seen:
                slots[at], slots[self.seen] = slots[self.seen], slots[at]
                self.seen += 1
        return taken, []

    def ready(self, count: int, min_fill: int) -> bool:
        return len(self.slots) >= max(1, min_fill)

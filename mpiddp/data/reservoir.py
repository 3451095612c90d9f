"""Which of the samples that have arrived is drawn next, and which one leaves: a reservoir, or first in, first out.

Both hold numbers of slots, and know nothing of what is in them.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np


class Fifo:
    """Slots in the order of their arrival; each is drawn once, and leaves."""

    def __init__(self, seed: int = 0) -> None:
        self.slots: list[int] = []
        self.seen = 0
        """How many slots, from the front of ``slots``, have been drawn."""
        self._random = random.Random(seed)

    def add(self, slots: Sequence[int]) -> None:
        self.slots += slots

    def evict(self) -> int | None:
        """Remove a slot that has been drawn, and return it; None if there is none."""
        return None

    def draw(self, count: int, last: bool) -> tuple[list[int], list[int]]:
        """Return ``count`` slots or fewer, and those of them that leave; ``last``: nothing arrives any more."""
        taken, self.slots = self.slots[:count], self.slots[count:]
        return taken, taken

    def ready(self, count: int, min_fill: int) -> bool:
        """Return True if ``count`` slots can be drawn while others arrive."""
        return len(self.slots) >= max(count, min_fill)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "random": np.array(self._random.getstate()[1], np.uint64)}

    def load_state_dict(self, state: dict[str, Any], slots: list[int]) -> None:
        """Take the state, with ``slots`` for those that were held."""
        self.slots, self.seen = slots, int(state["seen"])
        self._random.setstate((3, tuple(int(each) for each in state["random"]), None))


class Reservoir(Fifo):
    """Draw any slot with the same chance, also several times; a drawn one may have to leave, any with the same chance.

    No slot leaves before it was drawn. When nothing arrives any more, each draw takes its slot away.

    References
    ----------
    Meyer et al., High throughput training of deep surrogates from large ensemble runs (SC23, arXiv 2309.16743).
    """

    def evict(self) -> int | None:
        return self._remove(int(self._random.random() * self.seen)) if self.seen else None

    def _remove(self, at: int) -> int:
        # The last one that was drawn fills the gap, and the last one of all that one's.
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

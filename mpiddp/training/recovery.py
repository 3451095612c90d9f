"""``RestorePoint``: the state from which a run goes on when a rank has died and the others live on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mpiddp.distributed as dist
from mpiddp.distributed.shrink import survivable
from mpiddp.typing import Array

from .ranks import arrays_from, broadcasted
from .trainer import Trainer

Snapshot = tuple[dict[str, Any], dict[str, Array]]
"""The arguments of `Trainer.load_state_dict`."""


class RestorePoint:
    """The last moment (steps and epochs made) at which this rank's state was whole, and the way back to it.

    Parameters and the optimizer's state need no copy: only the optimizer's step changes them, and it waits for no other
    rank. A forward changes buffers, and the loader moves on, so these are copied here. Dropout follows from the number
    of the step. A communication hook's memory is taken from the most advanced rank.
    """

    def __init__(self) -> None:
        self.moment: tuple[int, int] | None = None
        self._here: Callable[[], Snapshot]
        """Goes back to the moment, if there is one, and returns the state."""

    def note(self, trainer: Trainer) -> None:
        """Record this moment; run before all other callbacks."""
        if not survivable():
            return
        buffers = [x.copy() for x in trainer.model.module.buffers()]
        self.moment = trainer.step, trainer.epoch
        self._here = functools.partial(_back, trainer, trainer.train_loader.state_dict(), buffers)

    def snapshot(self, source: int) -> Snapshot:
        """Return the state of rank ``source``, from now on this rank's too; collective."""
        state, arrays = self._here() if dist.get_rank() == source else ({}, {})
        found = broadcasted(state, source), dict(arrays_from(source, arrays))
        self._here = lambda: found
        self.moment = found[0]["step"], found[0]["epoch"]
        return found


def _back(trainer: Trainer, position: dict[str, Any], buffers: list[Array]) -> Snapshot:
    trainer.train_loader.load_state_dict(position)
    for x, kept in zip(trainer.model.module.buffers(), buffers, strict=True):
        x[...] = kept
    return trainer.common_state(), trainer.arrays() | trainer.own_arrays()

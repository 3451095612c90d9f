"""``RestorePoint``: the state from which a run goes on when a rank has died and the others live on."""

from __future__ import annotations

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
        self._loaded: Snapshot | None = None
        self._noted: tuple[Trainer, dict[str, Any], list[Array]] | None = None
        """The trainer, and copies of its loader's position and of its buffers."""

    def note(self, trainer: Trainer) -> None:
        """Record this moment; run before all other callbacks."""
        if not survivable():
            return
        buffers = [x.copy() for x in trainer.model.module.buffers()]
        self._loaded, self.moment = None, (trainer.step, trainer.epoch)
        self._noted = trainer, trainer.train_loader.state_dict(), buffers

    def snapshot(self, source: int) -> Snapshot:
        """Return the state of rank ``source``, from now on this rank's too; collective."""
        state, arrays = self._snapshot() if dist.get_rank() == source else ({}, {})
        state, arrays = broadcasted(state, source), dict(arrays_from(source, arrays))
        self._loaded = state, arrays
        self.moment = state["step"], state["epoch"]
        return self._loaded

    def _snapshot(self) -> Snapshot:
        if self._loaded is not None:
            return self._loaded
        assert self._noted is not None, "there is a moment"
        trainer, position, buffers = self._noted
        trainer.train_loader.load_state_dict(position)
        for x, kept in zip(trainer.model.module.buffers(), buffers, strict=True):
            x[...] = kept
        return trainer.common_state(), trainer.arrays() | trainer.own_arrays()

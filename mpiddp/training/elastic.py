"""``RestorePoint``: surviving ranks resume in the middle of a step after another rank has failed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mpiddp.distributed as dist
from mpiddp import nn
from mpiddp.device import is_device_array
from mpiddp.distributed.shrink import any_failed, survivable
from mpiddp.parallel import ZeroRedundancyOptimizer
from mpiddp.typing import Array

from .ranks import arrays_from
from .trainer import Trainer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Arguments of `Trainer.load_state_dict` on the surviving ranks."""

    state: dict[str, Any]
    arrays: dict[str, Array]


class RestorePoint:
    """The last consistent moment of the run on this rank, and the way back to it.

    Only an optimizer's step changes parameters and optimizer state, and it waits for no one, so these are always
    consistent. The changes of forward, loader and dropout since the last step are small and copied here. A
    communication hook's memory is that of the most advanced rank, in the middle of the repeated step.

    Parameters
    ----------
    before : Snapshot, optional
        State at the first moment.
    """

    def __init__(self, before: Snapshot | None = None) -> None:
        self._before = before
        self._trainer: Trainer | None = None
        self._moment: tuple[int, int] | None = None
        self._loader: dict[str, Any] = {}
        self._random: Any = None
        self._buffers: list[Array] = []

    def note(self, trainer: Trainer) -> None:
        """Record this moment if failures are survivable: a callback before all others."""
        if not survivable():
            return
        if self._moment is not None and trainer.step > self._moment[0]:
            self._before = None  # every rank has loaded it
        self._trainer, self._moment = trainer, (trainer.step, trainer.epoch)
        self._loader = trainer.train_loader.state_dict()
        self._random = nn.random.get_state()
        self._buffers = [x.copy() for x in trainer.model.module.buffers()]

    def survive(self, error: Exception) -> Snapshot:
        """Leave failed ranks out, and return the state of the most advanced survivor.

        Every survivor calls it with the error by which it learned of the failure; any other error is raised.
        """
        before = dist.get_world_size()
        while any_failed() and not self._is_shared():
            dist.shrink_group([])
            try:
                heritage = self._farthest()
            except Exception as another:
                error = another
                continue
            if dist.get_rank() == 0:
                now, step = dist.get_world_size(), heritage.state["step"]
                _logger.warning("%s; going on after step %d with %d of %d ranks", error, step, now, before)
            return heritage
        raise error

    def _is_shared(self) -> bool:
        """Return whether some state is on single ranks only, or in GPU memory that other ranks have mapped."""
        trainer = self._trainer
        return trainer is not None and (
            isinstance(trainer.optimizer, ZeroRedundancyOptimizer)
            or any(is_device_array(p.data) for p in trainer.model.module.parameters())
        )

    def _farthest(self) -> Snapshot:
        moments: list[tuple[int, int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(moments, self._moment)
        if None in moments:  # a rank had not begun, so none has made a step
            assert self._before is not None, "kept until all have made a step"
            return self._before
        return self._of(moments.index(max(each for each in moments if each is not None)))

    def _of(self, rank: int) -> Snapshot:
        """Return a rank's state at its last moment."""
        trainer = self._trainer
        assert trainer is not None
        trainer.train_loader.load_state_dict(self._loader)
        nn.random.set_state(self._random)
        for x, kept in zip(trainer.model.module.buffers(), self._buffers, strict=True):
            x[...] = kept
        told = [trainer.state_dict()]
        dist.broadcast_object_list(told, src=rank)
        (state,) = told
        # One rank's for all: ranks with different loss scales would get different parameters.
        state["stateful"] = state["stateful"][rank : rank + 1]
        return Snapshot(state, dict(arrays_from(rank, trainer.arrays() | trainer.own_arrays())))

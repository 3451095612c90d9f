"""``RestorePoint``: from where a run goes on, in the ranks that live, when one has died in the middle of a step."""

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
    """What those that live go on with: what `Trainer.load_state_dict` takes."""

    state: dict[str, Any]
    arrays: dict[str, Array]


class RestorePoint:
    """The last moment at which the run was whole on this rank, and the way back there.

    Only an optimizer's step changes parameters and its own state, and it waits for nobody: they are whole at any time.
    What forward, the loader and dropout have changed since the last step is small and kept here. What a communication
    hook remembers is that of the rank that has come farthest, in the middle of the step that is begun again.

    Parameters
    ----------
    before : Snapshot, optional
        With what the run goes on at its first moment.
    """

    def __init__(self, before: Snapshot | None = None) -> None:
        self._before = before
        self._trainer: Trainer | None = None
        self._moment: tuple[int, int] | None = None
        self._loader: dict[str, Any] = {}
        self._random: Any = None
        self._buffers: list[Array] = []

    def note(self, trainer: Trainer) -> None:
        """Let this be the moment, if there may be a way back: a callback that stands before all others."""
        if not survivable():
            return
        if self._moment is not None and trainer.step > self._moment[0]:
            self._before = None  # all have begun with it
        self._trainer, self._moment = trainer, (trainer.step, trainer.epoch)
        self._loader = trainer.train_loader.state_dict()
        self._random = nn.random.get_state()
        self._buffers = [x.copy() for x in trainer.model.module.buffers()]

    def survive(self, error: Exception) -> Snapshot:
        """Leave the dead out, and return what the one of those that live had that has come farthest.

        Every rank that lives calls it, with the error by which it has heard of a death; what is not one is raised.
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
        """Tell whether some of the run is on single ranks only, or in memory of GPUs that ranks have mapped."""
        trainer = self._trainer
        return trainer is not None and (
            isinstance(trainer.optimizer, ZeroRedundancyOptimizer)
            or any(is_device_array(p.data) for p in trainer.model.module.parameters())
        )

    def _farthest(self) -> Snapshot:
        moments: list[tuple[int, int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(moments, self._moment)
        if None in moments:  # somebody was still about to begin, so nobody has come farther
            assert self._before is not None, "it is there until all have made a step"
            return self._before
        return self._of(moments.index(max(each for each in moments if each is not None)))

    def _of(self, rank: int) -> Snapshot:
        """Return what a rank had at its last moment."""
        trainer = self._trainer
        assert trainer is not None
        trainer.train_loader.load_state_dict(self._loader)
        nn.random.set_state(self._random)
        for x, kept in zip(trainer.model.module.buffers(), self._buffers, strict=True):
            x[...] = kept
        told = [trainer.state_dict()]
        dist.broadcast_object_list(told, src=rank)
        (state,) = told
        # That of one step on all ranks: ranks with a loss scale of their own would make different parameters.
        state["stateful"] = state["stateful"][rank : rank + 1]
        return Snapshot(state, dict(arrays_from(rank, trainer.arrays() | trainer.own_arrays())))

"""``SequentialLR``: one schedule after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from mpiddp.optim.optimizer import Optimizer

from .scheduler import LRScheduler


class SequentialLR(LRScheduler):
    """One schedule after another, such as a warm-up and then a cosine.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    schedulers : sequence of LRScheduler
        Of the same optimizer. Each counts its steps from where it takes over.
    milestones : sequence of int
        Steps at which the second and the further ones take over.
    last_epoch : int, default -1
        The step at which to go on.

    Raises
    ------
    ValueError
        If the numbers do not fit, or a schedule is of another optimizer.

    Examples
    --------
    >>> from mpiddp.optim import SGD, lr_scheduler
    >>> from types import SimpleNamespace
    >>> sgd = SGD([SimpleNamespace(data=None, grad=None)], lr=1.0)
    >>> warm_up = lr_scheduler.LinearLR(sgd, start_factor=0.5, total_iters=2)
    >>> cosine = lr_scheduler.CosineAnnealingLR(sgd, T_max=4)
    >>> schedule = lr_scheduler.SequentialLR(sgd, [warm_up, cosine], milestones=[2])
    >>> for _ in range(5):
    ...     print(f"{sgd.param_groups[0]['lr']:.2f}")
    ...     schedule.step()
    0.50
    0.75
    1.00
    0.85
    0.50
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        last_epoch: int = -1,
    ) -> None:
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(
                "Sequential Schedulers expects number of schedulers provided to be one more than the number of "
                f"milestone points, but got {len(schedulers)} schedulers and {len(milestones)} milestones"
            )
        for i, scheduler in enumerate(schedulers):
            if scheduler.optimizer is not optimizer:
                raise ValueError(
                    f"SequentialLR expects all schedulers to belong to the same optimizer, but the one at index {i}, "
                    f"{type(scheduler).__name__}, has another"
                )
        self._schedulers = list(schedulers)
        self._milestones = list(milestones)
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the rate of the schedule whose turn it is."""
        i = bisect_right(self._milestones, step)
        return self._schedulers[i].lr_at(step - (self._milestones[i - 1] if i else 0), base_lr, index)

    def _apply(self) -> None:
        """Let the schedule whose turn it is set what it sets."""
        i = bisect_right(self._milestones, self.last_epoch)
        current = self._schedulers[i]
        current.last_epoch = self.last_epoch - (self._milestones[i - 1] if i else 0)
        current._apply()
        self._last_lr = current.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with that of each schedule."""
        return {**super().state_dict(), "_schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state, each schedule its own."""
        for scheduler, state in zip(self._schedulers, state_dict["_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "_schedulers"})


__all__ = ["SequentialLR"]

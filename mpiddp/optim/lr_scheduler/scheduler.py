"""``LRScheduler``: sets the learning rate of each parameter group as a function of the number of steps made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpiddp.optim.optimizer import Optimizer


class LRScheduler(ABC):
    """What all schedules share.

    Parameters
    ----------
    optimizer : Optimizer
        Its groups' ``lr`` is set, at once and by every :meth:`step`. The rate that a group has when it meets its first
        schedule is kept as ``initial_lr``.
    last_epoch : int, default -1
        The step at which to go on, for a schedule of which no state was saved.

    Attributes
    ----------
    last_epoch : int
        Number of steps made. A step may be an epoch or a batch.
    base_lrs : list of float
        ``initial_lr`` of each group.

    Raises
    ------
    TypeError
        If ``optimizer`` is none.
    KeyError
        If ``last_epoch`` is given and a group has no ``initial_lr``.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
        for i, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                raise KeyError(
                    f"param 'initial_lr' is not specified in param_groups[{i}] when resuming with last_epoch="
                    f"{last_epoch}; load the optimizer's state before making the schedule"
                )
        self.optimizer = optimizer
        self.base_lrs: list[float] = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self.last_epoch = last_epoch + 1
        self._apply()

    @abstractmethod
    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the learning rate after ``step`` steps of group ``index``, whose initial rate is ``base_lr``."""

    def get_lr(self) -> list[float]:
        """Return the learning rate that the schedule has now, for each group."""
        return [self.lr_at(self.last_epoch, base_lr, i) for i, base_lr in enumerate(self.base_lrs)]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate that was set last, for each group."""
        return self._last_lr

    def step(self, epoch: int | None = None) -> None:
        """Go one step on, or to a given one; to be called after the optimizer's step.

        Parameters
        ----------
        epoch : int, optional
            The number of steps made, for a schedule that goes on in the middle; by default one more than before.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def _apply(self) -> None:
        """Set the groups' learning rates."""
        groups = len(self.optimizer.param_groups)
        if groups != len(self.base_lrs):
            raise ValueError(
                f"the schedule was made for {len(self.base_lrs)} parameter groups, and its optimizer has {groups} now:"
                " add groups first, then make the schedule"
            )
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer and functions: plain numbers and lists."""
        return {
            key: value for key, value in self.__dict__.items() if key != "optimizer" and not _holds_functions(value)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a schedule of the same kind. The rates are the optimizer's to restore."""
        self.__dict__.update(state_dict)


def _holds_functions(value: object) -> bool:
    """Tell whether ``value`` is a function or a list of them, which are not saved."""
    return any(map(callable, value)) if isinstance(value, list) else callable(value)


__all__ = ["LRScheduler"]

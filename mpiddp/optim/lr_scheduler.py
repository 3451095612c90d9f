"""Learning-rate schedules, with torch's names.

The rate of each schedule is computed from the number of steps made and the initial rate alone, so a schedule can resume
at any step. The rates are those of torch's recursions up to rounding.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpiddp import moved

from .optimizer import Optimizer


class LRScheduler(ABC):
    """Base of all schedules.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer. The constructor and each :meth:`step` set the ``lr`` of its groups. The first rate of a group is
        kept as ``initial_lr``.

    Attributes
    ----------
    last_epoch : int
        The number of steps made; a step may be an epoch or a batch.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.optimizer = optimizer
        self.base_lrs: list[float] = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self.last_epoch = 0
        self._apply()

    @abstractmethod
    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the rate of group ``index``, with initial rate ``base_lr``, after ``step`` steps."""

    def get_last_lr(self) -> list[float]:
        """Return the rate that was set last, for each group."""
        return self._last_lr

    def step(self, epoch: int | None = None) -> None:
        """Go one step on, or to step ``epoch``. Call this after the optimizer's step."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def _apply(self) -> None:
        self._last_lr = [self.lr_at(self.last_epoch, base_lr, i) for i, base_lr in enumerate(self.base_lrs)]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps made, which is all that a schedule of the same options needs."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the number of steps in ``state_dict``."""
        self.step(state_dict["last_epoch"])


class LambdaLR(LRScheduler):
    """The initial rate times ``lr_lambda(step)``. For one function for each group, subclass `LRScheduler`."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Callable[[int], float]) -> None:
        self.lr_lambda = lr_lambda
        super().__init__(optimizer)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        return float(base_lr * self.lr_lambda(step))


class StepLR(LambdaLR):
    """A rate that is multiplied by ``gamma`` every ``step_size`` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        super().__init__(optimizer, lambda step: gamma ** (step // step_size))


class MultiStepLR(LambdaLR):
    """A rate that is multiplied by ``gamma`` at each step in ``milestones``. A step given twice counts twice."""

    def __init__(self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1) -> None:
        ordered = sorted(milestones)
        super().__init__(optimizer, lambda step: gamma ** bisect_right(ordered, step))


class LinearLR(LambdaLR):
    """A warm-up: the initial rate times a factor that goes from ``start_factor`` to ``end_factor``.

    The factor changes linearly in the first ``total_iters`` steps.
    """

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        change = end_factor - start_factor
        super().__init__(optimizer, lambda step: start_factor + change * (min(step, total_iters) / total_iters))


class CosineAnnealingLR(LRScheduler):
    """Half a cosine from the initial rate to ``eta_min`` in ``T_max`` steps, then back in the same number of steps.

    The schedule is that of arXiv:1608.03983.
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * step / self.T_max)) / 2


class SequentialLR(LRScheduler):
    """One schedule after another, such as a warm-up and a cosine.

    Parameters
    ----------
    schedulers : sequence of LRScheduler
        Schedules of the same optimizer. Each schedule counts steps from the milestone at which it begins.
    milestones : sequence of int
        The step at which each schedule but the first begins.

    Examples
    --------
    >>> from mpiddp.optim import SGD, lr_scheduler
    >>> from types import SimpleNamespace
    >>> sgd = SGD([SimpleNamespace(data=None, grad=None)], lr=1.0)
    >>> warm_up = lr_scheduler.LinearLR(sgd, start_factor=0.5, total_iters=2)
    >>> cosine = lr_scheduler.CosineAnnealingLR(sgd, T_max=4)
    >>> schedule = lr_scheduler.SequentialLR(sgd, [warm_up, cosine], milestones=[2])
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int]) -> None:
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(
                "Sequential Schedulers expects number of schedulers provided to be one more than the number of "
                f"milestone points, but got {len(schedulers)} schedulers and {len(milestones)} milestones"
            )

        self._schedulers = list(schedulers)
        self._milestones = list(milestones)
        super().__init__(optimizer)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        i = bisect_right(self._milestones, step)
        return self._schedulers[i].lr_at(step - (self._milestones[i - 1] if i else 0), base_lr, index)


moved.explain(__name__)

"""The schedules that are one formula each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from mpiddp.optim.optimizer import Optimizer

from .scheduler import LRScheduler


class LambdaLR(LRScheduler):
    """The initial rate times a function of the step.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    lr_lambda : callable or list of callable
        Function of the step, or one for each group. Not saved by :meth:`state_dict`.
    last_epoch : int, default -1
        The step at which to go on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        groups = len(optimizer.param_groups)
        self.lr_lambdas = [lr_lambda] * groups if callable(lr_lambda) else list(lr_lambda)
        if len(self.lr_lambdas) != groups:
            raise ValueError(f"Expected {groups} lr_lambdas, but got {len(self.lr_lambdas)}")
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the initial rate times the function's value."""
        return base_lr * self.lr_lambdas[index](step)


class StepLR(LRScheduler):
    """The rate times ``gamma`` every ``step_size`` steps.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    step_size : int
        Steps between two changes.
    gamma : float, default 0.1
        Factor of each change.
    last_epoch : int, default -1
        The step at which to go on.
    """

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the initial rate times ``gamma`` to the power of the number of changes."""
        return float(base_lr * self.gamma ** (step // self.step_size))


class MultiStepLR(LRScheduler):
    """The rate times ``gamma`` at each of ``milestones``.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    milestones : iterable of int
        Steps at which the rate changes; one that is given twice counts twice.
    gamma : float, default 0.1
        Factor of each change.
    last_epoch : int, default -1
        The step at which to go on.
    """

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones = sorted(milestones)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the initial rate times ``gamma`` to the power of the number of milestones passed."""
        return float(base_lr * self.gamma ** bisect_right(self.milestones, step))


class ExponentialLR(LRScheduler):
    """The rate times ``gamma`` at every step.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    gamma : float
        Factor of each step.
    last_epoch : int, default -1
        The step at which to go on.
    """

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the initial rate times ``gamma`` to the power of the step."""
        return float(base_lr * self.gamma**step)


class LinearLR(LRScheduler):
    """The rate times a factor that goes from ``start_factor`` to ``end_factor`` in ``total_iters`` steps: a warm-up.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    start_factor : float, default 1/3
        Factor of the first step, in (0, 1].
    end_factor : float, default 1.0
        Factor from step ``total_iters`` on, in [0, 1].
    total_iters : int, default 5
        Number of steps of the way.
    last_epoch : int, default -1
        The step at which to go on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not 0 < start_factor <= 1:
            raise ValueError(
                f"Starting multiplicative factor expected to be greater than 0 and less or equal to 1, got "
                f"{start_factor}"
            )
        if not 0 <= end_factor <= 1:
            raise ValueError(f"Ending multiplicative factor expected to be between 0 and 1, got {end_factor}")
        self.start_factor = start_factor
        self.end_factor = end_factor
        self.total_iters = total_iters
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the initial rate times the factor."""
        way = min(step, self.total_iters) / self.total_iters
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * way)


class CosineAnnealingLR(LRScheduler):
    """Half a cosine from the initial rate to ``eta_min`` in ``T_max`` steps, and back in as many more.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    T_max : int
        Steps to the minimum.
    eta_min : float, default 0.0
        The rate there.
    last_epoch : int, default -1
        The step at which to go on.

    References
    ----------
    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts" (2017).
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the rate on the cosine."""
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * step / self.T_max)) / 2


__all__ = ["CosineAnnealingLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "StepLR"]

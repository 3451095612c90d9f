"""``OneCycleLR``: up and down once, in a number of steps known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mpiddp.optim.optimizer import Group, Optimizer

from .scheduler import LRScheduler


class OneCycleLR(LRScheduler):
    """Up to a large rate and down to a tiny one in ``total_steps`` steps, momentum the other way round.

    Parameters
    ----------
    optimizer : Optimizer
        What to schedule.
    max_lr : float or list of float
        The largest rate, or one for each group.
    total_steps : int, optional
        Number of steps; or give ``epochs`` and ``steps_per_epoch``.
    epochs, steps_per_epoch : int, optional
        Their product is the number of steps.
    pct_start : float, default 0.3
        Share of the steps that go up, 0 to 1.
    anneal_strategy : {"cos", "linear"}, default "cos"
        Shape of the way.
    cycle_momentum : bool, default True
        Change momentum (of Adam: its first beta), too.
    base_momentum, max_momentum : float, default 0.85 and 0.95
        Momentum at the largest rate, and at both ends.
    div_factor : float, default 25.0
        The first rate is ``max_lr / div_factor``.
    final_div_factor : float, default 1e4
        The last rate is the first divided by this.
    three_phase : bool, default False
        Go down to the first rate as fast as up, and only then to the last.
    last_epoch : int, default -1
        The step at which to go on.

    References
    ----------
    Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates" (2017).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise ValueError("You must define either total_steps OR (epochs AND steps_per_epoch)")
        self.total_steps = (epochs or 0) * (steps_per_epoch or 0) if total_steps is None else total_steps
        if self.total_steps <= 0:
            raise ValueError(f"Expected positive integer total_steps, but got {self.total_steps}")
        if not 0 <= pct_start <= 1:
            raise ValueError(f"Expected float between 0 and 1 pct_start, but got {pct_start}")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy must be one of 'cos' or 'linear', instead got {anneal_strategy}")
        self.anneal_strategy = anneal_strategy
        groups = optimizer.param_groups
        self.max_lrs = list(max_lr) if isinstance(max_lr, Sequence) else [max_lr] * len(groups)
        if len(self.max_lrs) != len(groups):
            raise ValueError(f"max_lr must have the same length as optimizer.param_groups: {len(groups)}")
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not {"momentum", "betas"} & optimizer.defaults.keys():
            raise ValueError("optimizer must support momentum or beta1 with `cycle_momentum` option enabled")
        self.final_div_factor = final_div_factor
        self.momentum_bounds = [max_momentum, base_momentum]
        # Corners of the way: their steps, rates (0 the first, 1 the largest, 2 the last) and momenta (1 the smallest).
        top = pct_start * self.total_steps - 1
        end = float(self.total_steps - 1)
        if three_phase:
            self.corners = [(0.0, 0, 0), (top, 1, 1), (2 * top, 0, 0), (end, 2, 0)]
        else:
            self.corners = [(0.0, 0, 0), (top, 1, 1), (end, 2, 0)]
        if last_epoch == -1:
            for group, largest in zip(groups, self.max_lrs, strict=True):
                group["initial_lr"] = largest / div_factor
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base_lr: float, index: int) -> float:
        """Return the rate on the way."""
        rates = base_lr, self.max_lrs[index], base_lr / self.final_div_factor
        (_, left, _), (_, right, _), way = self._leg(step)
        return self._between(rates[left], rates[right], way)

    def _apply(self) -> None:
        """Set the groups' learning rates and momenta."""
        super()._apply()
        if self.cycle_momentum:
            (_, _, left), (_, _, right), way = self._leg(self.last_epoch)
            momentum = self._between(self.momentum_bounds[left], self.momentum_bounds[right], way)
            for group in self.optimizer.param_groups:
                _set_momentum(group, momentum)

    def _leg(self, step: int) -> tuple[tuple[float, int, int], tuple[float, int, int], float]:
        """Return the corners between which ``step`` lies, and how far along it is, 0 to 1."""
        if step > self.total_steps:
            raise ValueError(f"Tried to step {step} times. The specified number of total steps is {self.total_steps}")
        i = next((i for i, corner in enumerate(self.corners[1:-1], 1) if step <= corner[0]), len(self.corners) - 1)
        left, right = self.corners[i - 1], self.corners[i]
        return left, right, (step - left[0]) / (right[0] - left[0])

    def _between(self, start: float, end: float, way: float) -> float:
        """Return the value after ``way`` of the way from ``start`` to ``end``."""
        if self.anneal_strategy == "linear":
            return (end - start) * way + start
        return end + (start - end) / 2 * (math.cos(math.pi * way) + 1)


def _set_momentum(group: Group, momentum: float) -> None:
    """Set what plays the part of momentum in a group."""
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


__all__ = ["OneCycleLR"]

"""``TrainStep``: one step on all ranks, from the batches of an accumulation window to changed parameters."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace, is_device_array, upload
from mpiddp.distributed import Work
from mpiddp.nested import map_nested
from mpiddp.nn import Module
from mpiddp.nn.utils import clip_grad_norm_
from mpiddp.optim import Optimizer
from mpiddp.parallel import DistributedDataParallel, SyncBatchNorm
from mpiddp.typing import Array

from .metrics import MetricSum, count_correct
from .ranks import gathered

_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Part of a batch on this rank."""

    inputs: Any
    targets: Array
    samples: int
    """0 on a rank without samples, whose inputs and targets only stand in."""
    total: int
    """Samples of all ranks."""
    place: tuple[int, ...] = (0,)
    """In a model with virtual ranks: whose micro-batch this is, and epoch and number in it of the whole batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    tally: MetricSum
    """Sums over the samples of all ranks."""
    updated: bool
    broken: list[str]
    """Parameters whose gradient is not finite."""
    finite: bool
    """This rank's losses are finite."""
    last: Batch


@dataclasses.dataclass(eq=False)
class TrainStep:
    """The part of a `Trainer` that makes a step: forward, backward, average, clip, update.

    The gradient is that of the mean loss over all samples of all ranks: of ``n`` samples in a batch, ``n0`` in the
    window's first and ``T`` in all, a batch's loss is multiplied by ``n / n0``, and the sum of the gradients by ``n0 /
    T`` during reduction.
    """

    model: DistributedDataParallel
    optimizer: Optimizer
    loss_fn: Callable[[Any, Array], Tensor]
    _: dataclasses.KW_ONLY
    correct_fn: Callable[[Any, Array], float] = count_correct
    accumulate: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        self._on_device = any(is_device_array(p.data) for p in self.model.module.parameters())
        self._waited_s = 0.0
        """Seconds in which steps have waited for the ranks' sums."""
        self._mixes_samples = any(isinstance(module, SyncBatchNorm) for module in self.model.module.modules())

    def make(self, first: Batch, following: Iterator[Batch], stop: Callable[[], bool]) -> Outcome:
        """Make a step of ``first`` and up to `accumulate` - 1 that follow; ``stop`` is asked at the last one."""
        virtual_ranks = self.model.virtual_ranks
        tally = MetricSum(rows=virtual_ranks or 1)
        reference = max(1, first.samples)
        batch, samples, total = first, first.samples, first.total
        for upcoming in itertools.islice(following, self.window() - 1):
            with self._part_of_step(batch, reference, first.total, last=False):
                loss = self._forward(batch, tally)
                self._backward(loss, 1 if virtual_ranks else batch.samples / reference)
            batch, samples = upcoming, samples + upcoming.samples
            total += batch.total
        tally.add(stop=stop())
        with self._part_of_step(batch, reference if samples else 0, total, last=True):
            loss = self._forward(batch, tally)
            # Metrics are sent before backward, to arrive during it; with a GPU after it, because reading them waits.
            early = None if self._on_device else self._summing(tally)
            self._backward(loss, 1 if virtual_ranks else batch.samples / reference)
        broken = self._broken(tally)
        finite, summing = early or self._summing(tally)
        began = time.perf_counter()
        summing.wait()
        self._waited_s += time.perf_counter() - began
        return Outcome(tally, self._update(tally, broken), broken, finite, batch)

    def window(self) -> int:
        """Return how many batches of the loader make a step."""
        return len(self.model.own_virtual_ranks) if self.model.virtual_ranks else self.accumulate

    def _part_of_step(self, batch: Batch, samples: int, total: int, *, last: bool) -> AbstractContextManager[None]:
        if self.model.virtual_ranks:
            return self.model.micro_batch(*batch.place, n_samples=batch.samples, total=batch.total)
        return self.model.weighted(samples, total) if last else self._alone(samples, total)

    @contextmanager
    def _alone(self, samples: int, total: int) -> Iterator[None]:
        """Send no gradients, but tell layers that average over ranks in forward this rank's weight."""
        with self.model.no_sync(), self.model.weighted(samples, total) if self._mixes_samples else nullcontext():
            yield

    @staticmethod
    def _summing(tally: MetricSum) -> tuple[bool, Work]:
        """Start to sum all ranks' metrics; return True for a finite loss on this rank, and the Work."""
        tally.read()
        return bool(np.isfinite(tally["loss"])), tally.all_reduce()

    def _broken(self, tally: MetricSum) -> list[str]:
        """Name parameters whose averaged gradient is not finite; read pending device numbers, too."""
        named = [(name, p.grad) for name, p in self.model.module.named_parameters() if p.grad is not None]
        if not self._on_device:
            return [name for name, grad in named if not is_finite(grad)]
        squares = [grad.reshape(-1) @ grad.reshape(-1) for _, grad in named]
        found = zip(named, tally.read(squares), strict=True)
        # Averaged gradients are the same on all ranks, and so is the result.
        return [name for (name, grad), square in found if not (np.isfinite(square) or is_finite(grad))]

    def faults(self, outcome: Outcome) -> tuple[str, str]:
        """Name the values that are not finite, their ranks, and the likely cause.

        Collective; it discards the gradients.
        """
        spoilt = [name for name, p in self.model.module.named_parameters() if not is_finite(p.data)]
        if ranks := _ranks_where(not outcome.finite):
            what = f"the loss is not finite on rank {ranks}"
            largest, name = max(
                (float(abs(p.data).max()), name) for name, p in self.model.module.named_parameters() if p.size
            )
            cause = (
                f"finite parameters, the largest {largest:.3g} in {name}; lower the learning rate if that is too large,"
                " else look at this batch's inputs and at what the loss takes the logarithm of"
            )
        else:
            what = f"the averaged gradient of {_listed(outcome.broken)} is not finite"
            guilty = _ranks_where(not self._own_gradient_is_finite(outcome.last))
            whose = (
                f"that of rank {guilty}, computed again, is not" if guilty else "computed again, no rank's own is so"
            )
            cause = f"finite losses; {whose}; lower the learning rate, or look for a division by zero in a backward"
        if spoilt:
            cause = f"parameters that are not finite: {_listed(spoilt)}"
        return what, cause

    def _forward(self, batch: Batch, tally: MetricSum) -> Tensor | None:
        """Return a batch's mean loss and count it; None without samples."""
        if not (batch.samples or self._mixes_samples):
            self.model.skip_forward()
            return None
        return self.count(self.model, batch, tally)

    def count(self, model: Module, batch: Batch, tally: MetricSum) -> Tensor:
        """Return the mean loss of a model on a batch, and add it and the correct samples to the sums."""
        inputs, targets = batch.inputs, batch.targets
        if self._on_device:
            inputs, targets = map_nested(upload, (inputs, targets), np.ndarray)
        if not batch.samples:  # the other ranks' layers wait for this rank's sums, of an empty batch
            inputs, targets = inputs[:0], targets[:0]
        with _no_mean_of_nothing(batch.samples):
            output = model(inputs)
            loss = self.loss_fn(output, targets)
        if batch.samples:
            correct = self.correct_fn(output, targets)
            mean = loss.data.astype(np.float64) if self._on_device else loss.item()
            tally.add(batch.place[0], samples=batch.samples, loss=mean * batch.samples, correct=correct)
        return loss

    def _backward(self, loss: Tensor | None, weight: float) -> None:
        if loss is not None:
            with _no_mean_of_nothing(weight):
                loss.backward(None if weight == 1 else np.asarray(weight, loss.dtype))

    def _update(self, tally: MetricSum, broken: list[str]) -> bool:
        """Update if loss and gradients are finite; return whether they are."""
        sound = bool(np.isfinite(tally["loss"])) and not broken
        if sound:
            if self.clip_norm is not None:
                clip_grad_norm_(self.model.module.parameters(), self.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sound

    def _own_gradient_is_finite(self, batch: Batch) -> bool:
        with self._alone(max(1, batch.samples), batch.total):
            self._backward(self._forward(batch, MetricSum()), 1.0)
        return all(is_finite(p.grad) for p in self.model.module.parameters())


def _no_mean_of_nothing(weight: float) -> AbstractContextManager[Any]:
    """Silence NumPy about the mean loss of an empty batch, NaN of weight 0."""
    return nullcontext() if weight else np.errstate(divide="ignore", invalid="ignore")


def is_finite(x: Array | None) -> bool:
    """Return True if all elements are finite, which one pass tells."""
    if x is None:
        return True
    flat = x.reshape(-1)
    # A sum of squares is fast and never hides a NaN, but may overflow without an infinite element.
    with np.errstate(over="ignore", invalid="ignore"):
        xp = array_namespace(flat)
        return bool(xp.isfinite(flat @ flat)) or bool(xp.isfinite(flat).all())


def _ranks_where(here: bool) -> str:
    return ", ".join(str(rank) for rank, yes in enumerate(gathered(here)) if yes)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

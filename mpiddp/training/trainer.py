"""``Trainer``: synchronous training of any model on all ranks.

Knows how steps, epochs and ranks fit together; what a model, a loss, a sample or a file is, it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor, no_grad
from mpiddp.data import DataLoader
from mpiddp.distributed import all_gather_object, get_world_size
from mpiddp.optim import Optimizer
from mpiddp.typing import Array

from .averaging import AveragedModel
from .metrics import EpochMetrics, Tally, count_correct

Callback = Callable[["Trainer"], object]
EVENTS = ("epoch_begin", "step_end", "epoch_end")
"""When callbacks are called: on every rank, in the order of the lists, with the trainer as the only argument."""


class Trainer:
    """Trains a model on all ranks, step by step together.

    Parameters
    ----------
    model : AveragedModel
        A `DistributedDataParallel` or a `NaiveAveraging`.
    optimizer : Optimizer
        Of the model's parameters.
    loss_fn : callable
        Gives the mean loss, a Tensor, of the model's output and the targets.
    train_loader : DataLoader
        Gives batches (inputs, targets), equally many on every rank; best with a `GlobalBatchSampler`, which makes
        steps independent of the number of ranks.
    test_loader : DataLoader, optional
        Gives each test sample on one rank: ``DistributedSampler(..., mode="exact")``. Ranks may have unequal numbers of
        batches.
    correct_fn : callable, default count_correct
        Gives the number of samples, of an output and its targets, for which the model is right.
    callbacks : mapping of str to sequence of callable, optional
        Lists by event: ``epoch_begin``, ``step_end``, ``epoch_end``. Callbacks may communicate, if all ranks do.

    Attributes
    ----------
    epoch : int
        Epochs completed; while one runs, its number from 0.
    step : int
        Steps made since the beginning.
    running : Tally
        Sums over the samples of all ranks in the epoch that runs.
    history : list of EpochMetrics
        Of all epochs so far.

    Raises
    ------
    ValueError
        If ``callbacks`` names an event that does not exist.

    Notes
    -----
    A step sends the gradients and one message of 24 bytes, which goes while backward runs.

    Examples
    --------
    >>> trainer = Trainer(ddp, optimizer, F.nll_loss, train_loader, test_loader)  # doctest: +SKIP
    >>> trainer.fit(epochs=20)  # doctest: +SKIP
    >>> trainer.history[-1].accuracy  # doctest: +SKIP
    0.98
    """

    def __init__(
        self,
        model: AveragedModel,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Array], Tensor],
        train_loader: DataLoader,
        test_loader: DataLoader | None = None,
        *,
        correct_fn: Callable[[Any, Array], float] = count_correct,
        callbacks: Mapping[str, Sequence[Callback]] | None = None,
    ) -> None:
        unknown = set(callbacks or ()) - set(EVENTS)
        if unknown:
            raise ValueError(f"callbacks are called at {', '.join(EVENTS)}, not at {', '.join(sorted(unknown))}")
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.correct_fn = correct_fn
        self.callbacks: dict[str, list[Callback]] = {event: list((callbacks or {}).get(event, ())) for event in EVENTS}
        self.epoch = 0
        self.step = 0
        self.running = Tally("loss", "correct")
        self.history: list[EpochMetrics] = []
        self._waited_s = 0.0

    def fit(self, epochs: int) -> list[EpochMetrics]:
        """Train until ``epochs`` epochs are completed, and return the metrics of all."""
        while self.epoch < epochs:
            self._train_epoch()
        return self.history

    def evaluate(self, loader: Iterable[Any]) -> Tally:
        """Return ``loss`` and ``correct`` summed over the samples of all ranks, each counted once."""
        tally = Tally("loss", "correct")
        self.model.module.eval()
        with no_grad():
            for inputs, targets in loader:
                output = self.model.module(inputs)
                samples = len(targets)
                loss = self.loss_fn(output, targets).item() * samples
                tally.add(samples=samples, loss=loss, correct=self.correct_fn(output, targets))
        self.model.module.train()
        tally.all_reduce().wait()
        return tally

    @property
    def comm_exposed_s(self) -> float:
        """Seconds for which this rank has waited for communication in steps, in all."""
        return self.model.exposed_s + self._waited_s

    def _emit(self, event: str) -> None:
        for callback in self.callbacks[event]:
            callback(self)

    def _train_epoch(self) -> None:
        """Make a pass over the training data, then one over the test data."""
        self.model.module.train()
        self.train_loader.set_epoch(self.epoch)
        self.running = Tally("loss", "correct")
        self._emit("epoch_begin")
        began, exposed_before_s = time.perf_counter(), self.comm_exposed_s
        for inputs, targets in self.train_loader:
            self._train_step(inputs, targets)
            self.step += 1
            self._emit("step_end")
        epoch_s = time.perf_counter() - began
        share = Tally("exposed")
        share.add(exposed=(self.comm_exposed_s - exposed_before_s) / epoch_s)
        share.all_reduce().wait()
        began = time.perf_counter()
        tested = self.evaluate(self.test_loader) if self.test_loader is not None else None
        self.epoch += 1
        self.history.append(
            EpochMetrics(
                epoch=self.epoch,
                loss=self.running.mean("loss"),
                accuracy=tested.mean("correct") if tested else None,
                samples_per_s=self.running["samples"] / epoch_s,
                comm_exposed=share["exposed"] / get_world_size(),
                epoch_s=epoch_s,
                test_loss=tested.mean("loss") if tested else None,
                test_s=time.perf_counter() - began,
                lr=float(self.optimizer.param_groups[0]["lr"]),
            )
        )
        self._emit("epoch_end")

    def _train_step(self, inputs: Any, targets: Array) -> None:
        """Make one step, the same on all ranks, from this rank's share of the batch."""
        share = self.train_loader.current
        samples, total = (share.samples, share.global_samples) if share else (len(targets), None)
        tally = Tally("loss", "correct")
        loss: Tensor | None = None
        with self.model.weighted(samples, total):
            if samples:
                output = self.model(inputs)
                loss = self.loss_fn(output, targets)
                mean = loss.item()
                tally.add(samples=samples, loss=mean * samples, correct=self.correct_fn(output, targets))
            finite = loss is None or bool(np.isfinite(mean))
            # Sent before backward, so that it has come when backward is done.
            summing = tally.all_reduce()
            if loss is not None:
                loss.backward()
        began = time.perf_counter()
        summing.wait()
        self._waited_s += time.perf_counter() - began
        if not np.isfinite(tally["loss"]):
            self._stop_on_nan(finite)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.running.merge(tally)

    def _stop_on_nan(self, finite: bool) -> None:
        """Raise on every rank, naming those whose loss is no number and what they computed it with."""
        found = [True] * get_world_size()
        all_gather_object(found, finite)
        ranks = ", ".join(str(rank) for rank, fine in enumerate(found) if not fine)
        broken = [name for name, p in self.model.module.named_parameters() if not np.isfinite(p.data).all()]
        cause = (
            f"parameters that are not finite: {', '.join(broken)}; lower the learning rate"
            if broken
            else "finite parameters; look at the inputs of this batch and at what the loss takes the logarithm of"
        )
        raise FloatingPointError(
            f"the loss is not finite on rank {ranks} at step {self.step + 1} (epoch {self.epoch + 1}), with {cause}"
        )

"""``Trainer``: synchronous training of any model on all ranks, in steps and epochs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from mpiddp import nn
from mpiddp.autograd import no_grad
from mpiddp.data import DataLoader
from mpiddp.distributed import all_reduce, get_rank, get_world_size
from mpiddp.distributed.groups import default_group
from mpiddp.elastic import Stateful
from mpiddp.optim import Optimizer
from mpiddp.optim.lr_scheduler import LRScheduler
from mpiddp.parallel import ZeroRedundancyOptimizer
from mpiddp.parallel.replicas import broadcast_arrays
from mpiddp.serialization import flatten, unflatten
from mpiddp.typing import Array

from .metrics import EpochMetrics, MetricSum
from .ranks import gathered
from .train_step import Batch, Outcome, TrainStep

Callback = Callable[["Trainer"], object]
MAX_SKIPPED = 100
"""Steps in a row that may be skipped, if an epoch has more of them."""
EVENTS = ("epoch_begin", "step_skip", "step_end", "epoch_end")
"""When callbacks are called: on every rank, with the trainer, in the order of each list."""
_NUMBERS = ("epoch", "step", "skipped", "_skipped_in_a_row", "_last_lr", "_epoch_s", "_epoch_exposed_s")
"""Attributes that a checkpoint holds as they are."""


@dataclasses.dataclass(eq=False)
class Trainer(TrainStep):
    """Trains a model on all ranks in synchronous steps, each of which sends the gradients and 32 bytes.

    Parameters
    ----------
    model : DistributedDataParallel
    optimizer : Optimizer
    loss_fn : callable
        Mean loss, a Tensor, of output and targets.
    train_loader : DataLoader
        (inputs, targets), equally many on every rank.
    test_loader : DataLoader
        Each test sample on one rank. The samplers of both loaders are each a `GlobalBatchSampler`.
    correct_fn : callable
        Number of correct samples, of output and targets.
    stop : callable, optional
        It is asked once a step. If it is true on one rank, all ranks stop after this step.
    on_nan : {"stop", "skip"}
        What to do in a step whose loss or gradients are not finite. At most `MAX_SKIPPED` steps in a row are skipped,
        and fewer than an epoch has.
    stateful : mapping of str to Stateful, optional
        Each rank's further state for checkpoints.
    accumulate : int
        Batches of a step; the last step of an epoch takes the rest.
    clip_norm : float, optional
        Limit of all averaged gradients' norm.
    scheduler : LRScheduler, optional
        Advances after skipped steps, too.

    Attributes
    ----------
    callbacks : dict of str to list of callable
        By the `EVENTS`; ``step_skip`` comes before the ``step_end`` of a skipped step. They may communicate if all
        ranks do.
    epoch, step, skipped : int
        Completed; steps include skipped ones.
    running : MetricSum
        Sums over the samples of all ranks in the current epoch.
    history : list of EpochMetrics
    stopped : bool
        True, on all ranks, if one was told to stop.

    Examples
    --------
    >>> trainer = Trainer(ddp, optimizer, F.nll_loss, train_loader, test_loader)  # doctest: +SKIP
    >>> trainer.fit(epochs=20)[-1].accuracy  # doctest: +SKIP
    0.98
    """

    train_loader: DataLoader
    test_loader: DataLoader
    _: dataclasses.KW_ONLY
    stop: Callable[[], bool] = lambda: False
    on_nan: Literal["stop", "skip"] = "stop"
    stateful: dict[str, Stateful] = dataclasses.field(default_factory=dict)
    scheduler: LRScheduler | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.callbacks: dict[str, list[Callback]] = {event: [] for event in EVENTS}
        self.epoch = self.step = self.skipped = 0
        self.running = MetricSum()
        self.history: list[EpochMetrics] = []
        self.stopped = False
        self._skipped_in_a_row = 0
        self._last_lr = float(self.optimizer.param_groups[0]["lr"])
        # Seconds of the current epoch, of all runs that have trained in it.
        self._epoch_s = self._epoch_exposed_s = 0.0

    def fit(self, epochs: int) -> list[EpochMetrics]:
        """Train until ``epochs`` epochs are completed, or `stop` is true; return the metrics of all epochs."""
        while self.epoch < epochs and not self.stopped:
            self._train_epoch()
            if not self.stopped:
                self._complete_epoch()
        return self.history

    def evaluate(self) -> MetricSum:
        """Return ``loss`` and ``correct`` summed over the test samples of all ranks.

        All ranks test rank 0's model: its running statistics are broadcast.
        """
        tally = MetricSum(rows=self.model.virtual_ranks or 1)
        broadcast_arrays(list(self.model.module.buffers()), default_group())
        self.model.module.eval()
        with no_grad():
            for batch in _batches(self.test_loader):
                if batch.samples:
                    self.count(self.model.module, batch, tally)
        self.model.module.train()
        tally.all_reduce().wait()
        return tally

    def arrays(self) -> dict[str, Array]:
        """Return the live arrays of model and optimizer that are equal on every rank, by name."""
        found = {f"model.{name}": x for name, x in self.model.module.state_dict().items()}
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            found |= _by_names(self.optimizer.state_dict()["state"])
        return found

    def own_arrays(self) -> dict[str, Array]:
        """Return the live arrays of this rank alone: its shard of the optimizer's state, and of `stateful`."""
        found = _by_names(self.optimizer.shard()) if isinstance(self.optimizer, ZeroRedundancyOptimizer) else {}
        return found | flatten(self._states(), "stateful")[1]

    def wants(self, name: str, rank: int, ranks: int) -> bool:
        """Return True if this rank needs an array that ``rank`` of ``ranks`` alone held (see `own_arrays`)."""
        if name.startswith("optimizer."):
            optimizer, number = self.optimizer, int(name.split(".")[1])
            return not isinstance(optimizer, ZeroRedundancyOptimizer) or number in optimizer.owned()
        return get_rank() % ranks == rank

    def state_dict(self) -> dict[str, Any]:
        """Return all other state, as JSON values; collective."""
        return self.common_state() | {"stateful": gathered(flatten(self._states(), "stateful")[0])}

    def common_state(self) -> dict[str, Any]:
        """Return `state_dict` without the other ranks' state."""
        return {
            **{name.lstrip("_"): getattr(self, name) for name in _NUMBERS},
            "loader": self.train_loader.state_dict(),
            "running": self.running.sums.tolist(),
            "history": [dataclasses.asdict(metrics) for metrics in self.history],
            "schedule": [self.step if self.scheduler is None else self.scheduler.last_epoch, self._steps_an_epoch()],
            # The base class's method, because a sharded optimizer's needs the whole state collected first.
            "param_groups": Optimizer.state_dict(self.optimizer)["param_groups"],
            "random": [],  # older mpiddp looks for it; each step draws from seed, rank and number
            "stateful": [flatten(self._states(), "stateful")[0]],
            "bucket_order": self.model.bucket_order(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Continue from `state_dict` and `arrays`, also in the middle of an epoch.

        As many ranks continue to the same bits. With another number no sample of the epoch is lost or repeated, and a
        new rank takes the `stateful` of another. Of `own_arrays` each rank needs those that it `wants`. RuntimeError or
        ValueError if model, optimizer or data do not fit the state.
        """
        self.model.module.load_state_dict(
            {name.removeprefix("model."): x for name, x in arrays.items() if name.startswith("model.")}
        )
        if (order := state.get("bucket_order")) is not None:
            self.model.install_bucket_order(order)
        records: dict[int, dict[str, Array]] = {}
        for name, x in arrays.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                records.setdefault(int(number), {})[key] = x
        self.optimizer.load_state_dict({"state": records, "param_groups": state["param_groups"]})
        self.train_loader.load_state_dict(state["loader"])

        self.running = MetricSum()
        self.running.sums[:] = state["running"]
        if (states := state.get("stateful")) is not None:
            for name, mine in unflatten(states[get_rank() % len(states)], arrays).items():
                if name in self.stateful:
                    self.stateful[name].load_state_dict(mine)
        # Older mpiddp has not saved these.
        state = {"skipped": 0, "skipped_in_a_row": 0, "last_lr": self._last_lr, **state}
        for name in _NUMBERS:
            setattr(self, name, state[name.lstrip("_")])
        if self.scheduler is not None:
            # The schedule is this run's, which may have changed; the position is the checkpoint's, in epochs.
            position, steps = state.get("schedule", (self.step, self._steps_an_epoch()))
            self.scheduler.step(round(position * self._steps_an_epoch() / steps))
        self.history = [EpochMetrics(**metrics) for metrics in state["history"]]

    @property
    def comm_exposed_s(self) -> float:
        """Seconds this rank has waited for communication in steps."""
        return self.model.exposed_s + self._waited_s

    def _states(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.stateful.items()}

    def _emit(self, event: str) -> None:
        for callback in self.callbacks[event]:
            callback(self)

    def _train_epoch(self) -> None:
        self.model.module.train()
        self.train_loader.set_epoch(self.epoch)
        self._emit("epoch_begin")
        began, waited_before_s = time.perf_counter(), self.comm_exposed_s
        batches = _batches(self.train_loader)
        for batch in batches:
            self._make_step(batch, batches)
            now, waited_s = time.perf_counter(), self.comm_exposed_s
            self._epoch_s += now - began
            self._epoch_exposed_s += waited_s - waited_before_s
            began, waited_before_s = now, waited_s
            self._emit("step_end")
            if self.stopped:
                return
        if not self._epoch_s:  # running has no samples either if every step was skipped
            raise ValueError("train_loader gave no batch: there is nothing to train on")

    def _complete_epoch(self) -> None:
        exposed = np.array([self._epoch_exposed_s / self._epoch_s])
        all_reduce(exposed)
        began = time.perf_counter()
        tested = self.evaluate()
        self.epoch += 1
        self.history.append(
            EpochMetrics(
                epoch=self.epoch,
                loss=self.running.mean("loss"),
                accuracy=tested.mean("correct"),
                samples_per_s=self.running["samples"] / self._epoch_s,
                comm_exposed=float(exposed[0]) / get_world_size(),
                epoch_s=self._epoch_s,
                test_loss=tested.mean("loss"),
                test_s=time.perf_counter() - began,
                lr=self._last_lr,
            )
        )
        self.running = MetricSum()
        self._epoch_s = self._epoch_exposed_s = 0.0
        self._emit("epoch_end")

    def _steps_an_epoch(self) -> int:
        return -(-len(self.train_loader) // self.window())

    def _make_step(self, batch: Batch, following: Iterator[Batch]) -> None:
        self._last_lr = float(self.optimizer.param_groups[0]["lr"])
        nn.random.set_step(self.step)
        outcome = self.make(batch, following, self.stop)
        self.stopped = outcome.tally["stop"] > 0
        if outcome.updated:
            self.running.merge(outcome.tally)
            self._skipped_in_a_row = 0
        else:
            self._skip(outcome)
        self.step += 1
        if self.scheduler is not None:
            self.scheduler.step()
        if not outcome.updated:
            self._emit("step_skip")

    def _skip(self, outcome: Outcome) -> None:
        """Raise if skips are not wanted or go on for too long."""
        self._skipped_in_a_row += 1
        too_many = self._skipped_in_a_row >= min(MAX_SKIPPED, self._steps_an_epoch())
        if self.on_nan == "stop" or too_many:
            what, cause = self.faults(outcome)
            many = "" if self.on_nan == "stop" else f"{self._skipped_in_a_row} steps in a row were left out: "
            raise FloatingPointError(f"{many}{what} at step {self.step + 1} (epoch {self.epoch + 1}), with {cause}")
        self.skipped += 1


def _batches(loader: DataLoader) -> Iterator[Batch]:
    for inputs, targets in loader:
        share = loader.current
        assert share is not None, "a `GlobalBatchSampler` divides the batches"
        place = (share.virtual_rank, share.epoch, share.index)
        yield Batch(inputs, targets, share.samples, share.global_samples, place)


def _by_names(state: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    return {f"optimizer.{number}.{name}": x for number, record in state.items() for name, x in record.items()}

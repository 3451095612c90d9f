"""``Trainer``: synchronous training of any model on all ranks, in steps and epochs."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np

from mpiddp import nn
from mpiddp.autograd import Tensor, no_grad
from mpiddp.data import BatchShare, DataLoader
from mpiddp.device import array_namespace, is_device_array, upload
from mpiddp.distributed import Work, all_reduce, get_rank, get_world_size
from mpiddp.distributed.groups import default_group
from mpiddp.nested import map_nested
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.nn.utils import clip_grad_norm_
from mpiddp.optim import Optimizer
from mpiddp.optim.lr_scheduler import LRScheduler
from mpiddp.parallel import DistributedDataParallel, PowerSGDState, SyncBatchNorm, ZeroRedundancyOptimizer
from mpiddp.parallel.replicas import broadcast_arrays
from mpiddp.serialization import flatten, unflatten
from mpiddp.typing import Array

from .config import Config
from .metrics import EpochMetrics, MetricSum, count_correct
from .ranks import gathered

MAX_SKIPPED = 100
"""Steps in a row that may be skipped, if an epoch has more of them."""
_NUMBERS = ("epoch", "step", "skipped", "_skipped_in_a_row", "_last_lr", "_epoch_s", "_epoch_exposed_s")
"""Attributes that a checkpoint holds as they are."""
_MOST_NAMES = 5


class Batch(NamedTuple):
    """The part of a batch that this rank has. If the part has no samples, inputs and targets are placeholders."""

    inputs: Any
    targets: Array
    share: BatchShare


@dataclasses.dataclass(eq=False)
class Trainer:
    """Trains a model on all ranks in synchronous steps, each of which sends the gradients and 32 bytes.

    The gradient of a step is that of the mean loss over all samples of all ranks: of ``n`` samples in a batch, ``n0``
    in the step's first and ``T`` in all, a batch's loss is multiplied by ``n / n0``, and the sum of the gradients by
    ``n0 / T`` during reduction.

    Parameters
    ----------
    model : DistributedDataParallel
    optimizer : Optimizer
    train_loader : DataLoader
        (inputs, targets), equally many on every rank.
    test_loader : DataLoader
        Each test sample on one rank. The samplers of both loaders are each a `GlobalBatchSampler`.
    config : Config
        Its ``accumulate`` is the number of batches of a step; the last step of an epoch takes the rest. ``clip_norm``
        limits all averaged gradients together. Of steps whose loss or gradients are not finite, ``on_nan`` skips at
        most `MAX_SKIPPED` in a row, and fewer than an epoch has.
    stop : callable, optional
        It is asked once a step. If it is true on one rank, all ranks stop after this step.
    scheduler : LRScheduler, optional
        Advances after skipped steps, too.

    Attributes
    ----------
    loss_fn, correct_fn : callable
        Mean loss, a Tensor, and number of correct samples, of output and targets. They are the model's, if it has some.
    compression : PowerSGDState or None
        Each rank's own memory, if the communication hook is PowerSGD's.
    epoch, step, skipped : int
        Completed; steps include skipped ones.
    running : MetricSum
        Sums over the samples of all ranks in the current epoch.
    history : list of EpochMetrics
    stopped : bool
        True, on all ranks, if one was told to stop.

    Examples
    --------
    >>> trainer = Trainer(ddp, optimizer, train_loader, test_loader, Config())  # doctest: +SKIP
    >>> for ended in trainer.moments(epochs=20):  # doctest: +SKIP
    ...     if ended == "epoch":
    ...         print(trainer.history[-1].accuracy)
    """

    model: DistributedDataParallel
    optimizer: Optimizer
    train_loader: DataLoader
    test_loader: DataLoader
    config: Config
    stop: Callable[[], bool] = lambda: False
    scheduler: LRScheduler | None = None

    def __post_init__(self) -> None:
        # Cross entropy is right for log-probabilities, too: softmax inverts their logarithm.
        self.loss_fn: Callable[[Any, Array], Tensor] = getattr(self.model.module, "loss_fn", F.cross_entropy)
        self.correct_fn: Callable[[Any, Array], float] = getattr(self.model.module, "correct_fn", count_correct)
        self.epoch = self.step = self.skipped = 0
        self.running = MetricSum()
        self.history: list[EpochMetrics] = []
        self.stopped = False
        hook_state = self.model.comm_hook_state
        self.compression = hook_state if isinstance(hook_state, PowerSGDState) else None
        self._skipped_in_a_row = 0
        self._last_lr = float(self.optimizer.param_groups[0]["lr"])
        # Seconds of the current epoch, of all runs that have trained in it.
        self._epoch_s = self._epoch_exposed_s = 0.0
        self._on_device = any(is_device_array(p.data) for p in self.model.module.parameters())
        self._mixes_samples = any(isinstance(module, SyncBatchNorm) for module in self.model.module.modules())

    def moments(self, epochs: int) -> Iterator[Literal["step", "epoch"]]:
        """Train until ``epochs`` epochs are completed, or `stop` is true; yield what has just ended.

        That is the same on every rank, so the ranks may communicate before they go on.
        """
        while self.epoch < epochs and not self.stopped:
            self.model.module.train()
            self.train_loader.set_epoch(self.epoch)
            began = time.perf_counter()
            batches = _batches(self.train_loader)
            for batch in batches:
                self._make_step(batch, batches)
                now = time.perf_counter()
                self._epoch_s += now - began
                began = now
                yield "step"
                if self.stopped:
                    return
            self._complete_epoch()
            yield "epoch"

    def evaluate(self) -> MetricSum:
        """Return ``loss`` and ``correct`` summed over the test samples of all ranks.

        All ranks test rank 0's model: its running statistics are broadcast.
        """
        tally = MetricSum(rows=self.model.virtual_ranks or 1)
        broadcast_arrays(list(self.model.module.buffers()), default_group())
        self.model.module.eval()
        with no_grad():
            for batch in _batches(self.test_loader):
                if batch.share.samples:
                    self._count(self.model.module, batch, tally)
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
        """Return the live arrays of this rank alone: its shard of the optimizer's state, and `compression`."""
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
        new rank takes the `compression` of another. Of `own_arrays` each rank needs those that it `wants`. RuntimeError
        or ValueError if model, optimizer or data do not fit the state.
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
        states = state.get("stateful")
        if self.compression is not None and states is not None:
            mine = unflatten(states[get_rank() % len(states)], arrays)
            if "compression" in mine:
                self.compression.load_state_dict(mine["compression"])
        # Older mpiddp has not saved these.
        state = {"skipped": 0, "skipped_in_a_row": 0, "last_lr": self._last_lr, **state}
        for name in _NUMBERS:
            setattr(self, name, state[name.lstrip("_")])
        if self.scheduler is not None:
            # The schedule is this run's, which may have changed; the position is the checkpoint's, in epochs.
            position, steps = state.get("schedule", (self.step, self._steps_an_epoch()))
            self.scheduler.step(round(position * self._steps_an_epoch() / steps))
        self.history = [EpochMetrics(**metrics) for metrics in state["history"]]

    def _states(self) -> dict[str, Any]:
        return {} if self.compression is None else {"compression": self.compression.state_dict()}

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

    def _steps_an_epoch(self) -> int:
        return -(-len(self.train_loader) // self._window())

    def _window(self) -> int:
        """Return how many batches of the loader make a step."""
        return len(self.model.own_virtual_ranks) if self.model.virtual_ranks else self.config.accumulate

    def _make_step(self, first: Batch, following: Iterator[Batch]) -> None:
        """Make a step of ``first`` and up to ``accumulate`` - 1 that follow."""
        self._last_lr, exposed_before_s = float(self.optimizer.param_groups[0]["lr"]), self.model.exposed_s
        nn.random.set_step(self.step)
        virtual_ranks = self.model.virtual_ranks
        tally = MetricSum(rows=virtual_ranks or 1)
        batch, samples, total = first, first.share.samples, first.share.global_samples
        reference = max(1, samples)
        for upcoming in itertools.islice(following, self._window() - 1):
            with self._part_of_step(batch, reference, first.share.global_samples, last=False):
                loss = self._forward(batch, tally)
                self._backward(loss, 1 if virtual_ranks else batch.share.samples / reference)
            batch, samples = upcoming, samples + upcoming.share.samples
            total += batch.share.global_samples
        tally.add(stop=self.stop())
        with self._part_of_step(batch, reference if samples else 0, total, last=True):
            loss = self._forward(batch, tally)
            # Metrics are sent before backward, to arrive during it; with a GPU after it, because reading them waits.
            early = None if self._on_device else self._summing(tally)
            self._backward(loss, 1 if virtual_ranks else batch.share.samples / reference)
        broken = self._broken(tally)
        finite, summing = early or self._summing(tally)
        began = time.perf_counter()
        summing.wait()
        self._epoch_exposed_s += time.perf_counter() - began + self.model.exposed_s - exposed_before_s
        self.stopped = tally["stop"] > 0
        sound = bool(np.isfinite(tally["loss"])) and not broken
        if sound:
            if self.config.clip_norm is not None:
                clip_grad_norm_(self.model.module.parameters(), self.config.clip_norm)
            self.optimizer.step()
            self.running.merge(tally)
            self._skipped_in_a_row = 0
        self.optimizer.zero_grad()
        if not sound:
            self._skip(broken, finite, batch)
        self.step += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def _part_of_step(self, batch: Batch, samples: int, total: int, *, last: bool) -> AbstractContextManager[None]:
        if self.model.virtual_ranks:
            share = batch.share
            place = share.virtual_rank, share.epoch, share.index
            return self.model.micro_batch(*place, n_samples=share.samples, total=share.global_samples)
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

    def _skip(self, broken: list[str], finite: bool, last: Batch) -> None:
        """Leave out a step with ``broken`` gradients, or a loss that is not ``finite`` on some rank.

        Raise if that is not wanted or goes on for too long.
        """
        self._skipped_in_a_row += 1
        too_many = self._skipped_in_a_row >= min(MAX_SKIPPED, self._steps_an_epoch())
        if self.config.on_nan == "stop" or too_many:
            what, cause = self._faults(broken, finite, last)
            many = "" if self.config.on_nan == "stop" else f"{self._skipped_in_a_row} steps in a row were left out: "
            raise FloatingPointError(f"{many}{what} at step {self.step + 1} (epoch {self.epoch + 1}), with {cause}")
        self.skipped += 1
        if self.compression is not None:  # the gradient has spoilt it
            self.compression.error_dict.clear()
            self.compression.q_memory_dict.clear()

    def _faults(self, broken: list[str], finite: bool, last: Batch) -> tuple[str, str]:
        """Name the values that are not finite, their ranks, and the likely cause.

        Collective; it discards the gradients.
        """
        spoilt = [name for name, p in self.model.module.named_parameters() if not is_finite(p.data)]
        if ranks := _ranks_where(not finite):
            what = f"the loss is not finite on rank {ranks}"
            largest, name = max(
                (float(abs(p.data).max()), name) for name, p in self.model.module.named_parameters() if p.size
            )
            cause = (
                f"finite parameters, the largest {largest:.3g} in {name}; lower the learning rate if that is too large,"
                " else look at this batch's inputs and at what the loss takes the logarithm of"
            )
        else:
            what = f"the averaged gradient of {_listed(broken)} is not finite"
            guilty = _ranks_where(not self._own_gradient_is_finite(last))
            whose = (
                f"that of rank {guilty}, computed again, is not" if guilty else "computed again, no rank's own is so"
            )
            cause = f"finite losses; {whose}; lower the learning rate, or look for a division by zero in a backward"
        if spoilt:
            cause = f"parameters that are not finite: {_listed(spoilt)}"
        return what, cause

    def _forward(self, batch: Batch, tally: MetricSum) -> Tensor | None:
        """Return a batch's mean loss and count it; None without samples."""
        if not (batch.share.samples or self._mixes_samples):
            self.model.skip_forward()
            return None
        return self._count(self.model, batch, tally)

    def _count(self, model: nn.Module, batch: Batch, tally: MetricSum) -> Tensor:
        """Return the mean loss of a model on a batch, and add it and the correct samples to the sums."""
        inputs, targets, share = batch
        if self._on_device:
            inputs, targets = map_nested(upload, (inputs, targets), np.ndarray)
        if not share.samples:  # the other ranks' layers wait for this rank's sums, of an empty batch
            inputs, targets = inputs[:0], targets[:0]
        with _no_mean_of_nothing(share.samples):
            output = model(inputs)
            loss = self.loss_fn(output, targets)
        if share.samples:
            correct = self.correct_fn(output, targets)
            mean = loss.data.astype(np.float64) if self._on_device else loss.item()
            tally.add(share.virtual_rank, samples=share.samples, loss=mean * share.samples, correct=correct)
        return loss

    def _backward(self, loss: Tensor | None, weight: float) -> None:
        if loss is not None:
            with _no_mean_of_nothing(weight):
                loss.backward(None if weight == 1 else np.asarray(weight, loss.dtype))

    def _own_gradient_is_finite(self, batch: Batch) -> bool:
        with self._alone(max(1, batch.share.samples), batch.share.global_samples):
            self._backward(self._forward(batch, MetricSum(rows=self.model.virtual_ranks or 1)), 1.0)
        return all(p.grad is None or is_finite(p.grad) for p in self.model.module.parameters())


def _batches(loader: DataLoader) -> Iterator[Batch]:
    for inputs, targets in loader:
        assert loader.current is not None, "a `GlobalBatchSampler` divides the batches"
        yield Batch(inputs, targets, loader.current)


def _by_names(state: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    return {f"optimizer.{number}.{name}": x for number, record in state.items() for name, x in record.items()}


def _no_mean_of_nothing(weight: float) -> AbstractContextManager[Any]:
    """Silence NumPy about the mean loss of an empty batch, NaN of weight 0."""
    return nullcontext() if weight else np.errstate(divide="ignore", invalid="ignore")


def is_finite(x: Array) -> bool:
    """Return True if all elements are finite, which one pass tells."""
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

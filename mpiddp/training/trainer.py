"""``Trainer``: synchronous training of any model on all ranks, in steps and epochs."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from mpiddp.typing import Array

from .config import Config
from .metrics import EpochMetrics, MetricSum, count_correct
from .ranks import gathered

MAX_SKIPPED = 100
"""A run stops when it skips this many steps in a row, or all steps of an epoch if that is fewer."""
_NUMBERS = ("epoch", "step", "skipped", "_skipped_in_a_row", "_last_lr", "_epoch_s", "_epoch_exposed_s")
"""Names of attributes. A checkpoint holds their values, under these names without the leading underscore."""
_MOST_NAMES = 5


class Batch(NamedTuple):
    """One rank's part of a batch. If the part has no samples, ``inputs`` and ``targets`` are placeholders."""

    inputs: Any
    targets: Array
    share: BatchShare


@dataclasses.dataclass(eq=False)
class Trainer:
    """Training of a model on all ranks in synchronous steps.

    A step sends the gradients, and 32 bytes of metrics for the rank or for each virtual rank.

    The gradient of a step is that of the mean loss over all samples of all ranks. A rank multiplies the mean loss of
    each of its batches by ``n / n0`` before backward, and the reduction multiplies the rank's gradients by ``n0 / T``:
    ``n`` is the number of this rank's samples in the batch, ``n0`` that in the first batch of the step (at least 1),
    and ``T`` the number of all samples of the step on all ranks. With virtual ranks
    `DistributedDataParallel.micro_batch` multiplies by ``n / T``.

    Parameters
    ----------
    model : DistributedDataParallel
    optimizer : Optimizer
    train_loader : DataLoader
        Loader of (inputs, targets) whose batch sampler is a `GlobalBatchSampler`, so that all ranks make equally many
        steps.
    test_loader : DataLoader
        Loader of (inputs, targets) that gives each test sample to one rank, also by a `GlobalBatchSampler`.
    config : Config
        ``accumulate`` is the number of batches of a step; the last step of an epoch takes the rest. ``clip_norm``
        limits the norm of all averaged gradients together. With ``on_nan="skip"`` the optimizer makes no step from a
        loss or gradients that are not finite; the run fails at `MAX_SKIPPED` such steps in a row, or at a whole epoch
        of them.
    stop : callable, optional
        Function that is called once a step. If it returns True on one rank, all ranks stop after that step.
    scheduler : LRScheduler, optional
        Schedule of the learning rate, which advances after every step, even a skipped one.

    Attributes
    ----------
    loss_fn, correct_fn : callable
        Functions of output and targets: the mean loss, a Tensor, and the number of correct samples. The model's
        attributes of these names are used, if it has them.
    compression : PowerSGDState or None
        State of the communication hook if that is PowerSGD's; it differs between ranks.
    epoch, step, skipped : int
        Numbers of completed epochs, of steps including the skipped ones, and of skipped steps.
    running : MetricSum
        Sums over the samples of all ranks in the current epoch.
    history : list of EpochMetrics
    stopped : bool
        True, on all ranks, once `stop` has returned True on one of them.

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
        # Cross entropy is right for log-probabilities, too: its log-softmax leaves them unchanged.
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
        # Seconds spent in the current epoch, including those before a checkpoint that the run resumed from.
        self._epoch_s = self._epoch_exposed_s = 0.0
        self._on_device = any(is_device_array(p.data) for p in self.model.module.parameters())
        self._mixes_samples = any(isinstance(module, SyncBatchNorm) for module in self.model.module.modules())

    def moments(self, epochs: int) -> Iterator[Literal["step", "epoch"]]:
        """Train until ``epochs`` epochs are completed or a rank's `stop` returns True.

        Yield "step" after each step and "epoch" after each epoch. All ranks yield the same, so the caller may
        communicate with the other ranks before it continues.
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
        """Return ``loss`` and ``correct`` summed over the test samples of all ranks. All ranks call this together.

        Rank 0 broadcasts its buffers (running statistics) first, so that all ranks test the same model.
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint takes from rank 0, without copying its arrays.

        It is equal on all ranks, except for buffers such as running statistics, and for times. There rank 0's are kept.
        """
        optimizer = self.optimizer
        # `ZeroRedundancyOptimizer.state_dict` works only after its whole state was collected, so the method of the base
        # class is called.
        sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
        return {
            **{name.lstrip("_"): getattr(self, name) for name in _NUMBERS},
            "model": self.model.module.state_dict(),
            "optimizer": Optimizer.state_dict(optimizer) | {"state": {}} if sharded else optimizer.state_dict(),
            "loader": self.train_loader.state_dict(),
            "running": self.running.sums.tolist(),
            "history": [dataclasses.asdict(metrics) for metrics in self.history],
            "schedule": [self.step if self.scheduler is None else self.scheduler.last_epoch, self._steps_an_epoch()],
            "bucket_order": self.model.bucket_order(),
        }

    def own_state(self) -> dict[str, Any]:
        """Return the state that only this rank has, without copying its arrays.

        It has the rank's shard of a `ZeroRedundancyOptimizer`'s state, and the state of `compression`.
        """
        optimizer, compression = self.optimizer, self.compression
        shard = {"optimizer": optimizer.shard()} if isinstance(optimizer, ZeroRedundancyOptimizer) else {}
        return shard if compression is None else shard | {"compression": compression.state_dict()}

    def wanted(self, own: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
        """Return the part of an `own_state` that this rank needs, if ``rank`` of ``ranks`` had that state."""
        optimizer, records = self.optimizer, own.get("optimizer", {})
        owned = optimizer.owned() if isinstance(optimizer, ZeroRedundancyOptimizer) else records
        found = {"optimizer": {number: record for number, record in records.items() if number in owned}}
        return own | found if get_rank() % ranks == rank else found

    def load_state_dict(self, state: Mapping[str, Any], own: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue from a `state_dict` and what is `wanted` of each rank's `own_state`, also in the middle of an epoch.

        Training continues to the same bits if the facts of `reproducibility.current` are the same, such as the number
        of ranks. With another number no sample of the epoch is lost or repeated, and an added rank takes the
        `compression` of an old one. RuntimeError or ValueError if the state does not fit the model, optimizer or data.
        """
        self.model.module.load_state_dict(state["model"])
        if state["bucket_order"] is not None:
            self.model.install_bucket_order(state["bucket_order"])
        records = dict(state["optimizer"]["state"])
        for each in own:
            records |= each.get("optimizer", {})
            if self.compression is not None and "compression" in each:
                self.compression.load_state_dict(each["compression"])
        self.optimizer.load_state_dict(state["optimizer"] | {"state": records})
        self.train_loader.load_state_dict(state["loader"])
        self.running = MetricSum()
        self.running.sums[:] = state["running"]
        for name in _NUMBERS:
            setattr(self, name, state[name.lstrip("_")])
        if self.scheduler is not None:
            # The options of the schedule are this run's and may have changed. Its position is the checkpoint's,
            # converted by way of epochs, because an epoch may have another number of steps now.
            position, steps = state["schedule"]
            self.scheduler.step(round(position * self._steps_an_epoch() / steps))
        self.history = [EpochMetrics(**metrics) for metrics in state["history"]]

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
        """Return the number of the loader's batches in a step."""
        return len(self.model.own_virtual_ranks) if self.model.virtual_ranks else self.config.accumulate

    def _make_step(self, first: Batch, following: Iterator[Batch]) -> None:
        """Make a step with the batch ``first`` and the next `_window` - 1 of ``following``, or those that are left."""
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
            # Without a GPU the metrics are sent before backward, which overlaps with their reduction. With a GPU they
            # are sent after backward, because reading the loss waits for the GPU.
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
        """Send no gradients in this block. `SyncBatchNorm` averages over ranks in forward, so it gets the weight."""
        with self.model.no_sync(), self.model.weighted(samples, total) if self._mixes_samples else nullcontext():
            yield

    @staticmethod
    def _summing(tally: MetricSum) -> tuple[bool, Work]:
        """Start to sum the metrics over all ranks. Return whether this rank's loss is finite, and the Work."""
        tally.read()
        return bool(np.isfinite(tally["loss"])), tally.all_reduce()

    def _broken(self, tally: MetricSum) -> list[str]:
        """Return the names of parameters whose averaged gradient is not finite.

        With a GPU, one copy to the host fetches what is needed for this, and the metrics that ``tally`` has collected.
        """
        named = [(name, p.grad) for name, p in self.model.module.named_parameters() if p.grad is not None]
        if not self._on_device:
            return [name for name, grad in named if not is_finite(grad)]
        squares = [grad.reshape(-1) @ grad.reshape(-1) for _, grad in named]
        found = zip(named, tally.read(squares), strict=True)
        # Averaged gradients are the same on all ranks, so all ranks return the same names. A sum of squares may be
        # infinite by overflow; `is_finite` then decides.
        return [name for (name, grad), square in found if not (np.isfinite(square) or is_finite(grad))]

    def _skip(self, broken: list[str], finite: bool, last: Batch) -> None:
        """Leave out a step, because of ``broken`` gradients or because the loss is not ``finite`` on some rank.

        FloatingPointError if `config.on_nan` is "stop", or if too many steps in a row were left out.
        """
        self._skipped_in_a_row += 1
        too_many = self._skipped_in_a_row >= min(MAX_SKIPPED, self._steps_an_epoch())
        if self.config.on_nan == "stop" or too_many:
            what, cause = self._faults(broken, finite, last)
            many = "" if self.config.on_nan == "stop" else f"{self._skipped_in_a_row} steps in a row were left out: "
            raise FloatingPointError(f"{many}{what} at step {self.step + 1} (epoch {self.epoch + 1}), with {cause}")
        self.skipped += 1
        if self.compression is not None:  # the values that are not finite have entered the hook's memory
            self.compression.error_dict.clear()
            self.compression.q_memory_dict.clear()

    def _faults(self, broken: list[str], finite: bool, last: Batch) -> tuple[str, str]:
        """Return two texts for an error: the values that are not finite with their ranks, and the likely cause.

        All ranks call this together. It may compute the last batch again, which changes the gradients.
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
        """Return the mean loss of a batch, and add it to ``tally``; None if this rank has no samples in the batch.

        With `SyncBatchNorm` every rank runs the model, even without samples.
        """
        if not (batch.share.samples or self._mixes_samples):
            self.model.skip_forward()
            return None
        return self._count(self.model, batch, tally)

    def _count(self, model: nn.Module, batch: Batch, tally: MetricSum) -> Tensor:
        """Return the mean loss of a model on a batch; add the loss and the number of correct samples to ``tally``."""
        inputs, targets, share = batch
        if self._on_device:
            inputs, targets = map_nested(upload, (inputs, targets), np.ndarray)
        if not share.samples:  # in SyncBatchNorm the other ranks wait for this rank, so it runs an empty batch
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


def _no_mean_of_nothing(weight: float) -> AbstractContextManager[Any]:
    """Silence NumPy's warnings if ``weight`` is 0: the mean loss of an empty batch is NaN."""
    return nullcontext() if weight else np.errstate(divide="ignore", invalid="ignore")


def is_finite(x: Array) -> bool:
    """Return True if all elements are finite. Mostly one pass over them is enough."""
    flat = x.reshape(-1)
    # A finite sum of squares has finite elements only. The sum may overflow although all elements are finite, so a sum
    # that is not finite needs the second, slower test.
    with np.errstate(over="ignore", invalid="ignore"):
        xp = array_namespace(flat)
        return bool(xp.isfinite(flat @ flat)) or bool(xp.isfinite(flat).all())


def _ranks_where(here: bool) -> str:
    return ", ".join(str(rank) for rank, yes in enumerate(gathered(here)) if yes)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

"""``Trainer``: synchronous training of any model on all ranks.

Knows how steps, epochs and ranks fit together; what a model, a loss, a sample or a file is, it is told.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mpiddp import nn
from mpiddp.autograd import Tensor, no_grad
from mpiddp.data import DataLoader
from mpiddp.distributed import all_gather_object, get_rank, get_world_size
from mpiddp.optim import Optimizer
from mpiddp.parallel import ZeroRedundancyOptimizer
from mpiddp.typing import Array

from .averaging import AveragedModel
from .metrics import EpochMetrics, Tally, count_correct
from .state import Stateful, put_together, take_apart

Callback = Callable[["Trainer"], object]
EVENTS = ("epoch_begin", "step_end", "epoch_end")
"""When callbacks are called: on every rank, in the order of the lists, with the trainer as the only argument."""


def _tally() -> Tally:
    return Tally("loss", "correct", "stop")


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
    stop : callable, optional
        Asked once a step whether this rank was told to stop; where one was, all ranks stop after the same step.
    on_nan : {"stop", "skip"}, default "stop"
        What to do in a step whose loss or gradients are not finite: raise, or leave the step out.
    callbacks : mapping of str to sequence of callable, optional
        Lists by event: ``epoch_begin``, ``step_end``, ``epoch_end``. Callbacks may communicate, if all ranks do.
    stateful : mapping of str to Stateful, optional
        By names, what else has a state that a checkpoint has to carry; the state may differ from rank to rank.

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
    skipped : int
        Steps left out.
    stopped : bool
        Whether a rank was told to stop; the same on all ranks.

    Raises
    ------
    ValueError
        If ``callbacks`` names an event that does not exist.

    Notes
    -----
    A step sends the gradients and one message of 32 bytes, which goes while backward runs.

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
        stop: Callable[[], bool] = lambda: False,
        on_nan: Literal["stop", "skip"] = "stop",
        callbacks: Mapping[str, Sequence[Callback]] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
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
        self.stop = stop
        self.on_nan = on_nan
        self.callbacks: dict[str, list[Callback]] = {event: list((callbacks or {}).get(event, ())) for event in EVENTS}
        self.stateful = dict(stateful or {})
        self.epoch = 0
        self.step = 0
        self.running = _tally()
        self.history: list[EpochMetrics] = []
        self.skipped = 0
        self.stopped = False
        self._waited_s = 0.0
        # Of the epoch that runs, over all processes that have had a part in it.
        self._epoch_s = self._epoch_exposed_s = 0.0

    def fit(self, epochs: int) -> list[EpochMetrics]:
        """Train until ``epochs`` epochs are completed, or `stop` has said so, and return the metrics of all epochs."""
        while self.epoch < epochs and not self.stopped:
            self._train_epoch()
            if not self.stopped:
                self._complete_epoch()
        return self.history

    def evaluate(self, loader: Iterable[Any]) -> Tally:
        """Return ``loss`` and ``correct`` summed over the samples of all ranks, each counted once."""
        tally = _tally()
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

    def arrays(self) -> dict[str, Array]:
        """Return the live arrays of model and optimizer, the same on every rank, by names for a checkpoint."""
        found = {f"model.{name}": x for name, x in self.model.module.state_dict().items()}
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            found |= _by_names(self.optimizer.state_dict()["state"])
        return found

    def own_arrays(self) -> dict[str, Array]:
        """Return the live arrays that only this rank has: its share of an optimizer's state, and that of `stateful`."""
        found = _by_names(self.optimizer.shard()) if isinstance(self.optimizer, ZeroRedundancyOptimizer) else {}
        return found | take_apart(self._states(), "stateful")[1]

    def wants(self, name: str, rank: int, ranks: int) -> bool:
        """Tell whether this rank goes on with an array that ``rank`` of ``ranks`` alone had (see `own_arrays`)."""
        if name.startswith("optimizer."):
            sharded = isinstance(self.optimizer, ZeroRedundancyOptimizer)
            return not sharded or int(name.split(".")[1]) in self.optimizer.owned()
        return get_rank() % ranks == rank

    def state_dict(self) -> dict[str, Any]:
        """Return everything else that decides how training goes on, as JSON knows it. Every rank calls it."""
        own: list[Any] = [None] * get_world_size()
        all_gather_object(own, (nn.random.get_state(), take_apart(self._states(), "stateful")[0]))
        random_states, states = (list(each) for each in zip(*own, strict=True))
        return {
            "epoch": self.epoch,
            "step": self.step,
            "loader": self.train_loader.state_dict(),
            "running": self.running.sums.tolist(),
            "epoch_s": self._epoch_s,
            "epoch_exposed_s": self._epoch_exposed_s,
            "history": [dataclasses.asdict(metrics) for metrics in self.history],
            "skipped": self.skipped,
            # Not its own method: that of a sharded optimizer wants the whole state collected first.
            "param_groups": Optimizer.state_dict(self.optimizer)["param_groups"],
            "random": random_states,
            "stateful": states,
            "bucket_order": self.model.bucket_order(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Go on where `state_dict` and `arrays` were taken, in the middle of an epoch too.

        With as many ranks as then, training goes on to the same bits. With another number no sample of the epoch is
        lost or repeated; a rank that was not there begins its own stream of dropout, and goes on with what of
        `stateful` another rank had. Of `own_arrays` each rank needs those that it `wants`.

        Raises
        ------
        RuntimeError, ValueError
            If model, optimizer or data are not those of the state.
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
        if get_rank() < len(state["random"]):
            nn.random.set_state(state["random"][get_rank()])
        self.running = _tally()
        self.running.sums[:] = state["running"]
        if (states := state.get("stateful")) is not None:
            for name, mine in put_together(states[get_rank() % len(states)], arrays).items():
                if name in self.stateful:
                    self.stateful[name].load_state_dict(mine)
        self.epoch, self.step, self.skipped = state["epoch"], state["step"], state.get("skipped", 0)
        self._epoch_s, self._epoch_exposed_s = state["epoch_s"], state["epoch_exposed_s"]
        self.history = [EpochMetrics(**metrics) for metrics in state["history"]]

    @property
    def comm_exposed_s(self) -> float:
        """Seconds for which this rank has waited for communication in steps, in all."""
        return self.model.exposed_s + self._waited_s

    def _states(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.stateful.items()}

    def _emit(self, event: str) -> None:
        for callback in self.callbacks[event]:
            callback(self)

    def _train_epoch(self) -> None:
        """Make a pass over the training data, or what remains of it."""
        self.model.module.train()
        self.train_loader.set_epoch(self.epoch)
        self._emit("epoch_begin")
        began, waited_before_s = time.perf_counter(), self.comm_exposed_s
        for inputs, targets in self.train_loader:
            self._train_step(inputs, targets)
            self.step += 1
            now, waited_s = time.perf_counter(), self.comm_exposed_s
            self._epoch_s += now - began
            self._epoch_exposed_s += waited_s - waited_before_s
            began, waited_before_s = now, waited_s
            self._emit("step_end")
            if self.stopped:
                return
        if not self._epoch_s:  # samples may be none where every step was left out
            raise ValueError("train_loader gave no batch: there is nothing to train on")

    def _complete_epoch(self) -> None:
        """Measure what the epoch has brought, and make ready for the next one."""
        share = Tally("exposed")
        share.add(exposed=self._epoch_exposed_s / self._epoch_s)
        share.all_reduce().wait()
        began = time.perf_counter()
        tested = self.evaluate(self.test_loader) if self.test_loader is not None else None
        self.epoch += 1
        self.history.append(
            EpochMetrics(
                epoch=self.epoch,
                loss=self.running.mean("loss"),
                accuracy=tested.mean("correct") if tested else None,
                samples_per_s=self.running["samples"] / self._epoch_s,
                comm_exposed=share["exposed"] / get_world_size(),
                epoch_s=self._epoch_s,
                test_loss=tested.mean("loss") if tested else None,
                test_s=time.perf_counter() - began,
                lr=float(self.optimizer.param_groups[0]["lr"]),
            )
        )
        self.running = _tally()
        self._epoch_s = self._epoch_exposed_s = 0.0
        self._emit("epoch_end")

    def _train_step(self, inputs: Any, targets: Array) -> None:
        """Make one step, the same on all ranks, from this rank's share of the batch."""
        share = self.train_loader.current
        samples, total = (share.samples, share.global_samples) if share else (len(targets), None)
        tally = _tally()
        tally.add(stop=self.stop())
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
        self.stopped = tally["stop"] > 0
        # Averaged gradients are the same on all ranks, so all of them see what one sees.
        broken = [name for name, p in self.model.module.named_parameters() if not _is_finite(p.grad)]
        if np.isfinite(tally["loss"]) and not broken:
            self.optimizer.step()
            self.running.merge(tally)
        elif self.on_nan == "stop":
            self._stop_on_nan(finite, broken)
        else:
            self.skipped += 1
        self.optimizer.zero_grad()

    def _stop_on_nan(self, finite: bool, broken: Sequence[str]) -> None:
        """Raise on every rank, naming the ranks whose loss is no number, and what they computed it with."""
        found = [True] * get_world_size()
        all_gather_object(found, finite)
        ranks = [str(rank) for rank, fine in enumerate(found) if not fine]
        spoilt = [name for name, p in self.model.module.named_parameters() if not _is_finite(p.data)]
        if not ranks:
            what = f"the averaged gradient of {', '.join(broken)} is not finite"
            cause = "finite losses; lower the learning rate, or look for a division by zero in a backward"
        else:
            what = f"the loss is not finite on rank {', '.join(ranks)}"
            cause = "finite parameters; look at this batch's inputs and at what the loss takes the logarithm of"
        if spoilt:
            cause = f"parameters that are not finite: {', '.join(spoilt)}"
        raise FloatingPointError(f"{what} at step {self.step + 1} (epoch {self.epoch + 1}), with {cause}")


def _by_names(state: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    """Return an optimizer's state as arrays by names."""
    return {f"optimizer.{number}.{name}": x for number, record in state.items() for name, x in record.items()}


def _is_finite(x: Array | None) -> bool:
    """Tell whether all elements are finite; one pass, where they are."""
    if x is None:
        return True
    flat = x.reshape(-1)
    # A sum of squares is quick and never hides a NaN, but may overflow where no element is infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(flat @ flat)) or bool(np.isfinite(flat).all())

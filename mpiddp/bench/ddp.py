"""``bench ddp``: times of training steps with and without communication, in mpiddp and in torch.

All columns have the same networks and batch sizes, train by SGD with momentum, and compute new gradients in every step.
They take turns. Their names:

alone        mpiddp's model without communication (``no_sync``)
ddp          mpiddp's model in mpiddp's DistributedDataParallel, which averages the gradients
exposed      the part of ddp's time in which backward only waits for communication
virtual      as ddp, with as many virtual ranks as ranks
torch        torch's model in torch's DistributedDataParallel on Gloo
torch-alone  torch's model without communication
on-mpiddp    torch's model in torch's DistributedDataParallel on the backend "mpiddp"
in-ours      torch's model in `mpiddp.torch.DistributedDataParallel`
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiddp import nn, optim
from mpiddp.distributed import ProcessGroup
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.parallel import DistributedDataParallel
from mpiddp.training.models import MLP, Net

from .job import Bench, job
from .timing import Way

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "mlp": MLP,
    "mlp-wide": lambda: MLP(hidden=2048),
}
"""The networks that take part, by name. The units in the layers of the perceptrons are 784-256-256-10 and
784-2048-2048-10."""

_TORCHS = ("torch", "torch-alone", "on-mpiddp", "in-ours")
_ADDED = ("ddp/alone", "virtual/ddp", "ddp/torch")


class Batch(NamedTuple):
    """Random images (N, 1, 28, 28) and their random classes (N)."""

    images: Any
    labels: Any

    @classmethod
    def of(cls, rank: int, samples: int) -> "Batch":
        rng = np.random.default_rng(rank)
        return cls(rng.standard_normal((samples, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, samples))


class Ours:
    def __init__(
        self, network: str, batch: "Batch", process_group: ProcessGroup | None = None, virtual_ranks: int | None = None
    ) -> None:
        nn.manual_seed(1)
        self.model = DistributedDataParallel(
            NETWORKS[network](), process_group=process_group, virtual_ranks=virtual_ranks
        )
        self._optimizer = optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.batch = batch
        self.exposed_s: list[float] = []
        """The seconds of each step in which backward only waited."""

    def step(self) -> None:
        waited_s = self.model.exposed_s
        self._step()
        self.exposed_s.append(self.model.exposed_s - waited_s)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        F.nll_loss(self.model(self.batch.images), self.batch.labels).backward()
        self._optimizer.step()

    def alone(self) -> None:
        """Make a step whose gradients are not sent to other ranks."""
        with self.model.no_sync():
            self._step()

    def virtual(self) -> None:
        """Make a step with virtual ranks. This rank has one of them, so it runs one micro-batch."""
        with self.model.micro_batch(self.model.own_virtual_ranks[0], 0):
            F.nll_loss(self.model(self.batch.images), self.batch.labels).backward()
        self._optimizer.step()


def run(arguments: argparse.Namespace) -> int:
    with job(arguments) as here:
        theirs = here.torch() if arguments.torch else None
        here.say(
            f"# {arguments.batch} samples a rank, SGD with momentum, float32; times in ms, medians over"
            f" {arguments.rounds} rounds of {arguments.iterations} steps in turns, slowest rank"
        )
        columns = ["alone", "ddp", "exposed", "virtual", *(_TORCHS if theirs else ()), *_ADDED[: 3 if theirs else 2]]
        here.say("#network".ljust(12) + "".join(name.rjust(12) for name in columns))
        for network in NETWORKS:
            row = _measure(here, network, arguments, theirs)
            here.rows.append({"network": network, **row})
            cells = [f"{row[name]:.2f}" if "/" in name else f"{row[name] * 1e3:.3f}" for name in columns]
            here.say(network.ljust(12) + "".join(cell.rjust(12) for cell in cells))
        if theirs is not None:
            theirs.close()
    return 0


def _measure(here: Bench, network: str, arguments: argparse.Namespace, theirs: Any) -> dict[str, float]:
    batch = Batch.of(here.rank, arguments.batch)
    ours, virtual = Ours(network, batch), Ours(network, batch, virtual_ranks=here.size)
    calls: dict[str, Callable[[], object]] = {"alone": ours.alone, "ddp": ours.step, "virtual": virtual.virtual}
    if theirs is not None:
        calls |= theirs.train_steps(network, batch)
    for call in calls.values():
        here.clock.each(call, 3)
    ours.exposed_s.clear()
    took = here.clock.take_turns(
        {name: Way(call, arguments.iterations) for name, call in calls.items()}, arguments.rounds
    )
    row = {name: statistics.median(second for turn in turns for second in turn) for name, turns in took.items()}
    row["exposed"] = statistics.median(ours.exposed_s)
    for ratio in _ADDED:
        one, _, other = ratio.partition("/")
        if other in row:
            row[ratio] = row[one] / row[other]
    return row

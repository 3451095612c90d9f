"""``bench ddp``: training steps under DistributedDataParallel, beside the same steps alone and torch's DDP on Gloo.

All contenders train the same networks on batches of the same size by SGD with momentum, and take turns in one run, so
that a ratio compares what the machine gave to both at the same time.

alone     the step with gradients that stay on the rank (``no_sync``)
ddp       the step with gradients averaged over all ranks
exposed   the part of it in which backward had nothing to do but wait
torch     torch's DistributedDataParallel on Gloo
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiddp import nn, optim
from mpiddp.distributed import ProcessGroup
from mpiddp.nn import functional as F  # noqa: N812 (its customary name)
from mpiddp.parallel import DistributedDataParallel
from mpiddp.training.models import MLP, Net

from . import load, results
from .job import Job, header, job

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "mlp": MLP,
    "mlp-wide": lambda: MLP(hidden=2048),
}
"""The networks: the tutorial's convolutions, 784-256-256-10 and 784-2048-2048-10."""

_ADDED = ("ddp/alone", "ddp/torch")


class Batch(NamedTuple):
    """Images (N, 1, 28, 28) and their classes (N)."""

    images: Any
    labels: Any


class Ours:
    """Steps of mpiddp on one network.

    Parameters
    ----------
    network : str
        Its name.
    batch : Batch
        What every step trains on.
    process_group : ProcessGroup, optional
        The ranks; all by default.
    """

    def __init__(self, network: str, batch: Batch, process_group: ProcessGroup | None = None) -> None:
        nn.manual_seed(1)
        self.model = DistributedDataParallel(NETWORKS[network](), process_group=process_group)
        self._optimizer = optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self._batch = batch

    def step(self) -> None:
        """Train on the batch, together."""
        self._optimizer.zero_grad()
        F.nll_loss(self.model(self._batch.images), self._batch.labels).backward()
        self._optimizer.step()

    def alone(self) -> None:
        """Train on the batch without the others."""
        with self.model.no_sync():
            self.step()


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    with job() as here:
        environment = here.environment()
        here.say(header(environment))
        theirs = _torch(here) if arguments.torch else None
        here.say(
            f"# {arguments.batch} samples a rank, SGD with momentum, float32; times in ms, medians over"
            f" {arguments.rounds} rounds of {arguments.iterations} steps in turns, slowest rank"
        )
        columns = ["alone", "ddp", "exposed", *(["torch"] if theirs else []), *_ADDED[: 2 if theirs else 1]]
        here.say("#network".ljust(12) + "".join(name.rjust(12) for name in columns))
        rows = []
        for network in NETWORKS:
            row = _measure(here, network, arguments, theirs)
            rows.append({"network": network, **row})
            cells = [f"{row[name]:.2f}" if "/" in name else f"{row[name] * 1e3:.3f}" for name in columns]
            here.say(network.ljust(12) + "".join(cell.rjust(12) for cell in cells))
        if theirs is not None:
            theirs.close()
        if arguments.json:
            here.together(lambda: results.write(arguments.json, "ddp", environment, [], rows=rows))
    return 0


def _torch(here: Job) -> Any:
    """Return torch's side, or say why it is left out."""
    fault = None
    try:
        module = load("mpiddp.bench.ddp_torch")
    except ImportError as error:
        fault = str(error)
    if here.sum(fault is not None):
        here.say(f"# torch is left out: {fault}; pip install torch")
        return None
    return module.Torch(here)


def _measure(here: Job, network: str, arguments: argparse.Namespace, theirs: Any) -> dict[str, float]:
    """Return medians in seconds, and ratios."""
    rng = np.random.default_rng(here.rank)
    images = rng.standard_normal((arguments.batch, 1, 28, 28)).astype(np.float32)
    batch = Batch(images, rng.integers(0, 10, arguments.batch))
    ours = Ours(network, batch)
    ways: dict[str, Callable[[], object]] = {"alone": ours.alone, "ddp": ours.step}
    if theirs is not None:
        ways["torch"] = theirs.step(network, batch)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        here.clock.each(way, 3)
    exposed = []
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            waited_s = ours.model.exposed_s
            took[name] += here.clock.each(way, arguments.iterations)
            if name == "ddp":
                exposed.append((ours.model.exposed_s - waited_s) / arguments.iterations)
    row = {name: statistics.median(seconds) for name, seconds in took.items()}
    row["exposed"] = statistics.median(exposed)
    for ratio in _ADDED:
        one, _, other = ratio.partition("/")
        if other in row:
            row[ratio] = row[one] / row[other]
    return row

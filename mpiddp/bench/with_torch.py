"""Benchmarks of torch's collectives and DDP on the backends Gloo and mpiddp, with the same arrays as mpiddp's.

No other module of `mpiddp.bench` imports torch.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from mpiddp import torch as guest
from mpiddp.mpi.world import World
from mpiddp.training.models import perceptron

from . import operations
from .operations import Buffers, Contender
from .timing import Call


def net() -> nn.Module:
    """Return a torch model with the layers of ``mpiddp.training.models.Net``."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10), nn.LogSoftmax(dim=1)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "net": net,
    "mlp": lambda: perceptron(nn, 256),
    "mlp-wide": lambda: perceptron(nn, 2048),
}


def prepare(b: Buffers, group: Any, averages: bool) -> Call | None:
    """Return torch's call of the operation; None if torch or the group's backend has no such operation.

    ``averages`` tells whether the backend has ReduceOp.AVG, which Gloo lacks.
    """
    if b.op == "avg" and not averages:
        return None
    try:
        call = operations.torch(b, td, group, torch.from_numpy)
        call()  # a trial, which fails on all ranks or on none
    except (AttributeError, TypeError, RuntimeError, ValueError):  # torch may lack the ReduceOp or the dtype
        return None
    return call


class Torchs:
    """The part of torch in a benchmark's job: contenders and training steps. All ranks make this object together."""

    def __init__(self, world: World) -> None:
        torch.set_num_threads(1)
        if len(set(world.nodes)) == 1:  # Gloo would look up the host's name, which may fail
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        td.init_process_group("mpiddp")
        self._gloo = td.new_group(backend="gloo")
        self.contenders = [
            Contender("gloo", lambda b: prepare(b, self._gloo, averages=False)),
            Contender("torch", lambda b: prepare(b, None, averages=True)),
        ]

    def train_steps(self, network: str, batch: Any) -> dict[str, Call]:
        """Return functions that make a step of SGD, by the names of the columns in `mpiddp.bench.ddp`."""
        ddp = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
        images, labels = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)
        return {
            "torch": _train_step(ddp(NETWORKS[network](), process_group=self._gloo), images, labels),
            "torch-alone": _train_step(NETWORKS[network](), images, labels),
            "on-mpiddp": _train_step(ddp(NETWORKS[network]()), images, labels),
            "in-ours": _train_step(guest.DistributedDataParallel(NETWORKS[network]()), images, labels),
        }

    @staticmethod
    def close() -> None:
        with contextlib.suppress(RuntimeError):
            td.destroy_process_group()


def _train_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()

    return step

"""Gloo by torch.distributed, in the same processes on the same arrays, and under torch's DDP.

The one module here that imports torch.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional as F  # noqa: N812 (its customary name)
from torch.nn.parallel import DistributedDataParallel

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.world import World

from .operations import Buffers, Contender
from .timing import Call

_TIMEOUT = datetime.timedelta(seconds=60)


class Net(nn.Module):
    """As ``mpiddp.training.models.Net``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Any) -> Any:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def _mlp(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(hidden, 10),
        nn.LogSoftmax(dim=1),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {"net": Net, "mlp": lambda: _mlp(256), "mlp-wide": lambda: _mlp(2048)}


class Gloo(Contender):
    """Collective; MPI gives the ranks their numbers and an address."""

    name = "gloo"

    def __init__(self, world: World, comm: MPI.Intracomm) -> None:
        torch.set_num_threads(1)
        one_node = len(set(world.nodes)) == 1
        if one_node:  # the host's name may not resolve, or to an address elsewhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_node else world.hosts[0]
        store: Any = None
        if comm.rank == 0:
            store = TCPStore(host, 0, comm.size, True, _TIMEOUT, wait_for_workers=False)
        port = comm.bcast(store.port if store else None)
        if store is None:
            store = TCPStore(host, port, comm.size, False, _TIMEOUT)
        td.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)

    def prepare(self, b: Buffers) -> Call | None:
        try:
            x, output = torch.from_numpy(b.x), torch.from_numpy(b.output)
        except TypeError:  # a dtype that torch does not know
            return None
        if b.op == "avg":  # Gloo has no average
            return None
        op = getattr(td.ReduceOp, b.op.upper())
        root, here = b.root, b.rank == b.root
        # Older names give warnings in torch 2.13.
        gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)
        reduce_scatter = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)
        parts = [torch.from_numpy(part) for part in b.blocks(b.x if b.operation == "scatter" else b.output)]
        calls: dict[str, Call] = {
            "all_reduce": lambda: td.all_reduce(x, op),
            "broadcast": lambda: td.broadcast(x, root),
            "reduce": lambda: td.reduce(x, root, op),
            "all_gather": lambda: gather(output, x),
            "reduce_scatter": lambda: reduce_scatter(output, x, op),
            "gather": lambda: td.gather(x, parts if here else None, root),
            "scatter": lambda: td.scatter(output, parts if here else None, root),
            "all_to_all": lambda: td.all_to_all_single(output, x),
            "send_recv": lambda: _around(b, x, output),
            "barrier": td.barrier,
        }
        call = calls[b.operation]
        try:
            call()  # on all ranks alike
        except (RuntimeError, ValueError):
            return None
        return call

    def train_step(self, network: str, batch: Any) -> Call:
        """Return a step of SGD under torch's DistributedDataParallel."""
        model = DistributedDataParallel(NETWORKS[network](), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        images, labels = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)

        def step() -> None:
            optimizer.zero_grad()
            loss: Any = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()

        return step

    @staticmethod
    def close() -> None:
        with contextlib.suppress(RuntimeError):
            td.destroy_process_group()


def _around(b: Buffers, x: torch.Tensor, output: torch.Tensor) -> None:
    sent = td.isend(x, (b.rank + 1) % b.size)
    td.recv(output, (b.rank - 1) % b.size)
    assert sent is not None
    sent.wait()

"""torch's side of ``bench ddp``: the same networks under its DistributedDataParallel on Gloo.

`ddp` loads it where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its customary name)
from torch.nn.parallel import DistributedDataParallel

from .gloo import Gloo
from .job import Job


class Net(nn.Module):
    """``mpiddp.training.models.Net``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Any) -> Any:
        """Return log-probabilities."""
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


class Torch:
    """Steps of torch, beginning with its process group.

    Parameters
    ----------
    job : Job
        The ranks; all of them make it together.
    """

    def __init__(self, job: Job) -> None:
        self._gloo = Gloo(job)

    def step(self, network: str, batch: Any) -> Callable[[], object]:
        """Return what trains a network on a batch once."""
        model = DistributedDataParallel(NETWORKS[network](), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        images, labels = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)

        def step() -> None:
            optimizer.zero_grad()
            loss: Any = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()

        return step

    def close(self) -> None:
        """End torch's process group."""
        self._gloo.close()

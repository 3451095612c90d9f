"""A user's models in a training run, and DistributedDataParallel's options for them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from harness.configured import SAMPLES, configured, data
from harness.world import everybody

import mpiddp as dist
from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.training.build import build_trainer
from mpiddp.training.config import Config, UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.once]


class Unused(nn.Module):
    """Has a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(784, 10), nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))


class Apart(nn.Module):
    """Differs on every rank in buffer and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)
        self.layer.bias.data += dist.get_rank()
        self.register_buffer("rank", np.array([dist.get_rank()], np.float32))

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))


class Regression(nn.Module):
    """Brings a loss, and a count of right outputs, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 1)

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))

    @staticmethod
    def loss_fn(output, y):
        return F.mse_loss(output[:, 0], y.astype(np.float32))

    @staticmethod
    def correct_fn(output, y):
        return len(y) / 2


def tolerant(module):
    return dist.DistributedDataParallel(module, bucket_cap_mb=1e-5, find_unused_parameters=True)


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    module = ModuleType("models_of_ones_own")
    vars(module).update(Unused=Unused, Apart=Apart, Regression=Regression, tolerant=tolerant, wrong=dict)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def own(name: str, **options) -> Config:
    return configured(**{"model": f"models_of_ones_own:{name}", "dropout": None, "epochs": 1, **options})


def test_a_model_brings_its_own_loss(world):
    trainer = build_trainer(own("Regression", lr=1e-4), data())
    trainer.fit(1)
    assert trainer.history[0].accuracy == 0.5 and trainer.history[0].loss > 5


def test_unused_parameters_are_allowed_where_asked(world):
    # A batch that gives every rank a sample: one without any is not asked for its gradients.
    trainer = build_trainer(own("Unused", batch_size=SAMPLES, average="models_of_ones_own:tolerant"), data())
    trainer.fit(1)
    assert trainer.model.module.idle.weight.grad is None and len(trainer.model.bucket_sizes_bytes()) > 1
    trainer = build_trainer(own("Unused", batch_size=SAMPLES), data())
    with pytest.raises(RuntimeError, match="not used in producing loss"):
        trainer.fit(1)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model", "mpiddp's Module, got dict"),
        ("average", "mpiddp's DistributedDataParallel, got dict"),
        ("optimizer", "mpiddp's Optimizer, got dict"),
        ("schedule", "mpiddp's LRScheduler, got dict"),
    ],
)
def test_what_a_callable_must_return_is_said(world, option, said):
    with pytest.raises(UsageError, match=f"--{option} models_of_ones_own:wrong has to return {said}"):
        build_trainer(configured(**{"dropout": None, option: "models_of_ones_own:wrong"}), data())


def test_initial_values_are_the_first_ranks(world):
    module = build_trainer(own("Apart"), data()).model.module
    mean = float(module.layer.bias.data.mean())
    assert [round(each - everybody(mean)[0]) for each in everybody(mean)] == [0] * world.size
    assert everybody(float(module.rank[0])) == [0.0] * world.size

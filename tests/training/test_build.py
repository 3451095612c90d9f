"""A user's models in a training run."""

import numpy as np
import pytest
from harness.configured import configured, data

from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.training.build import build_trainer
from mpiddp.training.config import UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


class Regression(nn.Sequential):
    """Brings a loss, and a count of right outputs, of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 1))

    @staticmethod
    def loss_fn(output, y):
        return F.mse_loss(output[:, 0], y.astype(np.float32))

    @staticmethod
    def correct_fn(output, y):
        return len(y) / 2


def test_a_model_brings_its_own_loss(world):
    trainer = build_trainer(configured(model=f"{__name__}:Regression", dropout=None, lr=1e-4), data())
    list(trainer.moments(1))
    assert trainer.history[0].accuracy == 0.5 and trainer.history[0].loss > 5


KINDS = {"model": "Module", "average": "DistributedDataParallel", "optimizer": "Optimizer", "schedule": "LRScheduler"}


@pytest.mark.parametrize("option", KINDS)
def test_what_a_callable_must_return_is_said(world, option):
    with pytest.raises(UsageError, match=f"--{option} builtins:dict has to return mpiddp's {KINDS[option]}, got dict"):
        build_trainer(configured(**{"dropout": None, option: "builtins:dict"}), data())

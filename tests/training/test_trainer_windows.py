"""Runs that were stopped between the batches of a step, and plans that were changed, go on."""

from __future__ import annotations

import pytest
from harness.configured import BY_EPOCH, EPOCHS, configured, data, rate

import mpiddp as dist
from mpiddp import nn
from mpiddp.training.build import build_trainer
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

RESUMED = {
    "schedule": {"schedule": "cosine", "warmup_steps": 2, "accumulate": 3, "clip_norm": 0.5, "dropout": 0.3},
    "zero, adam": {"zero": True, "optimizer": "adam", "lr": 0.001, "accumulate": 2},
    "own hook and schedule": {"average": f"{__name__}:with_power_sgd", "schedule": BY_EPOCH, "accumulate": 2},
    "batch norm of all ranks, zero": {"model": "resnet", "sync_batchnorm": True, "zero": True, "accumulate": 3},
    "batch norm of each rank": {"model": "resnet", "accumulate": 3},
}


def with_power_sgd(module: nn.Module) -> dist.DistributedDataParallel:
    model = dist.DistributedDataParallel(module)
    model.register_comm_hook(dist.PowerSGDState(None, start_powerSGD_iter=2), dist.powerSGD_hook)
    return model


def bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in (trainer.arrays() | trainer.own_arrays()).items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_in_a_window_goes_on_to_the_same_bits(world, folder, name):
    config = configured(**RESUMED[name], output=folder, resume="auto")
    unbroken = build_trainer(config, data())
    unbroken.fit(EPOCHS)

    stopped = build_trainer(config, data())
    loss_fn, asked = stopped.loss_fn, []

    def counted(output, y):
        asked.append(stopped.step)
        return loss_fn(output, y)

    # As a signal that comes to one rank while the first batch of its window runs: rank 0 has a sample in every batch.
    stopped.loss_fn = counted
    at = {1: 6, 2: 4, 3: 3}[config.accumulate]
    stopped.stop = lambda: world.rank == 0 and at in asked
    stopped.fit(EPOCHS)
    # A step of one batch begins with the question, so there the signal came behind it.
    reached = at + 1 + (config.accumulate == 1)
    assert stopped.stopped and stopped.step == reached
    checkpointer = Checkpointer(config)
    checkpointer.save(stopped)
    checkpointer.finish()

    nn.manual_seed(99)
    resumed = build_trainer(config, data())
    Checkpointer(config).resume(resumed)
    assert resumed.step == reached
    resumed.fit(EPOCHS)
    assert resumed.step == unbroken.step and resumed.skipped == unbroken.skipped
    assert resumed.history[-1].lr == unbroken.history[-1].lr
    assert bits(resumed) == bits(unbroken)
    assert bits(stopped) != bits(unbroken), "or this test could not fail"


def test_a_changed_plan_holds_from_the_step_that_was_reached(world, folder):
    options = {"schedule": "cosine", "output": folder, "resume": "auto", "weight_decay": 0.1}
    config = configured(**options)
    trainer = build_trainer(config, data())
    trainer.fit(1)
    checkpointer = Checkpointer(config)
    checkpointer.save(trainer)
    checkpointer.finish()
    longer = configured(**options | {"epochs": 4, "lr": 0.4, "weight_decay": 0.2, "momentum": 0.5})
    resumed = build_trainer(longer, data())
    Checkpointer(longer).resume(resumed)
    (group,) = resumed.optimizer.param_groups
    assert group["lr"] == pytest.approx(rate(longer, 8, 32)) and group["lr"] != pytest.approx(rate(config, 8, 16))
    assert (group["weight_decay"], group["momentum"]) == (0.2, 0.5)

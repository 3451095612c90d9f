"""Runs that were stopped between the batches of a step, and plans that were changed, go on."""

from __future__ import annotations

import pytest
from harness.configured import BY_EPOCH, EPOCHS, configured, data, rate

from mpiddp import nn
from mpiddp.training.build import build_trainer
from mpiddp.training.checkpointer import Checkpointer

from .test_checkpointer import bits, save
from .test_options import powersgd

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

RESUMED = {
    "schedule": {"schedule": "cosine", "warmup_steps": 2, "accumulate": 3, "clip_norm": 0.5, "dropout": 0.3},
    "zero, adam": {"zero": True, "optimizer": "adam", "lr": 0.001, "accumulate": 2},
    "own hook and schedule": {"average": f"{powersgd.__module__}:powersgd", "schedule": BY_EPOCH, "accumulate": 2},
    "batch norm of all ranks, zero": {"model": "resnet", "sync_batchnorm": True, "zero": True, "accumulate": 3},
    "batch norm of each rank": {"model": "resnet", "accumulate": 3},
}


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
    save(stopped, config)

    nn.manual_seed(99)
    resumed = build_trainer(config, data())
    Checkpointer(config).resume(resumed)
    assert resumed.step == reached
    resumed.fit(EPOCHS)
    assert resumed.step == unbroken.step and resumed.skipped == unbroken.skipped
    assert resumed.history[-1].lr == unbroken.history[-1].lr
    assert bits(resumed) == bits(unbroken)
    assert bits(stopped) != bits(unbroken), "or this test could not fail"


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"weight_decay": 0.1}, {"epochs": 4, "lr": 0.4, "weight_decay": 0.2, "momentum": 0.5}),
        ({"warmup_steps": 2}, {"schedule": "constant", "warmup_steps": 0}),
    ],
)
def test_a_changed_plan_holds_from_the_step_that_was_reached(world, folder, options, changed):
    options = {"schedule": "cosine", "output": folder, "resume": "auto", **options}
    config, other = configured(**options), configured(**options | changed)
    trainer, resumed = build_trainer(config, data()), build_trainer(other, data())
    trainer.fit(1)
    save(trainer, config)
    Checkpointer(other).resume(resumed)
    (group,) = resumed.optimizer.param_groups
    expected = rate(other, 8, 8 * other.epochs)
    assert group["lr"] == pytest.approx(expected) and expected != pytest.approx(rate(config, 8, 16))
    assert (group["weight_decay"], group["momentum"]) == (other.weight_decay, other.momentum)

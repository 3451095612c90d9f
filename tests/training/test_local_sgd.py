"""Runs with ``--average local``: parameters are averaged every few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness.configured import trained
from harness.learning import assert_close, assert_same_bits_everywhere

import mpiddp as dist
from mpiddp.training import UsageError
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.ranks import raise_on_all_ranks

from .test_checkpointer import EPOCHS, SAMPLES, STEPS_AN_EPOCH, make

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


def own(name: str) -> dict[str, str]:
    return {"average": f"{__name__}:{name}"}


def each_step(module):
    return dist.DiLoCo(module.parameters(), 1, lr=1.0, momentum=0.0)


def never(module):
    return dist.DiLoCo(module.parameters(), 50, lr=1.0, momentum=0.0, warmup_steps=1000)


def in_halves(module):
    return dist.DiLoCo(module.parameters(), 4, 2, warmup_steps=1)


def warm(module):
    return dist.DiLoCo(module.parameters(), 4, warmup_steps=2)


def slow(module):
    return dist.DiLoCo(module.parameters(), 4, lr=0.25, momentum=0.5)


def parameters(trainer: Any) -> dict[str, Any]:
    return {name: p.data for name, p in trainer.model.module.named_parameters()}


def test_averages_after_every_step_are_averages_of_gradients(world):
    """Without momentum, and with batches of unequal size on the ranks."""
    local, ddp = trained(**own("each_step"), momentum=0.0), trained(momentum=0.0)
    assert_close(parameters(local), parameters(ddp))
    np.testing.assert_allclose([m.loss for m in local.history], [m.loss for m in ddp.history], rtol=1e-4)


@pytest.mark.parametrize("options", [{"average": "local", "period": 3}, own("in_halves")])
def test_ranks_have_one_model_at_the_end_of_an_epoch(world, options):
    trainer, config = make(**options)
    trainer.callbacks["epoch_end"].append(lambda t: assert_same_bits_everywhere(parameters(t)))
    trainer.fit(config.epochs)
    assert trainer.step == config.epochs * STEPS_AN_EPOCH and np.isfinite(trainer.history[-1].loss)


def test_start_is_ddp(world):
    ddp = trained()
    assert_close(parameters(trained(**own("never"))), parameters(ddp))


def resumed(stopped: Any, **options: Any) -> Any:
    trainer = make(**{"average": "local", **options})[0]
    arrays = {name: x.copy() for name, x in (stopped.arrays() | stopped.own_arrays()).items()}
    trainer.load_state_dict(stopped.state_dict(), arrays)
    return trainer


def test_ranks_have_one_model_at_the_end_of_an_epoch_of_another_batch_size(world):
    stopped = make(stop_after=2, average="local", period=1000)[0]
    stopped.fit(EPOCHS)
    trainer = resumed(stopped, period=1000, batch_size=12)
    trainer.callbacks["epoch_end"].append(lambda t: assert_same_bits_everywhere(parameters(t)))
    trainer.fit(EPOCHS)
    assert trainer.epoch == EPOCHS and trainer.step % -(-SAMPLES // 12)


def test_resumed_run_keeps_its_own_options_of_the_outer_step(world):
    stopped = make(stop_after=2, average="local", period=4)[0]
    stopped.fit(EPOCHS)
    trainer = resumed(stopped, **own("slow"))
    (group,) = trainer.stateful["local_sgd"].averager.outer_optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.25, 0.5)


def test_checkpoint_of_other_fragments_is_refused(world, folder):
    trainer, config = make(**own("in_halves"), output=folder, resume="auto")
    checkpointer = Checkpointer(config)
    checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)
    whole, config = make(**own("slow"), output=folder, resume="auto")
    with pytest.raises(UsageError, match="the state has 2 parts of the model, this one has 1: give the same fragments"):
        Checkpointer(config).resume(whole)


@pytest.mark.parametrize(
    "options",
    [{"compress": "fp16"}, {"zero": True}, {"average": "ddp"}, own("slow") | {"zero": True}],
)
def test_contradictions_are_refused(world, options):
    with pytest.raises(UsageError):
        trained(**{"average": "local", "period": 8, **options})
    assert dist.get_world_size() == world.size


def with_a_gradient_that_is_not_finite(world, step, **options):
    """Return a trainer whose last rank has a NaN in one step, and a parameter's name."""
    trainer, config = make(**{"average": "local", "period": 4, **options})
    name, bias = list(trainer.model.module.named_parameters())[-1]
    spoils = world.rank == world.size - 1
    bias.register_hook(lambda grad: grad * np.float32("nan" if spoils and trainer.step == step else 1))
    return trainer, config, name


def test_gradient_that_is_not_finite_on_one_rank_stops_all_with_its_name(world):
    trainer, config, name = with_a_gradient_that_is_not_finite(world, 5, on_nan="stop")
    found = rf"gradient of {name} is not finite on rank {world.size - 1} at step 6 \(epoch 1\)"
    with pytest.raises(FloatingPointError, match=found):
        trainer.fit(config.epochs)


def test_averaged_gradient_that_is_not_finite_is_so_on_all_ranks(world):
    trainer, config, name = with_a_gradient_that_is_not_finite(world, 0, **own("warm"), period=50)
    ranks = ", ".join(map(str, range(world.size)))
    with pytest.raises(FloatingPointError, match=rf"gradient of {name} is not finite on rank {ranks} at step 1 "):
        trainer.fit(config.epochs)


def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_of_all(world):
    trainer, config, _ = with_a_gradient_that_is_not_finite(world, 5, on_nan="skip")
    trainer.callbacks["epoch_end"].append(lambda t: assert_same_bits_everywhere(parameters(t)))
    trainer.fit(config.epochs)
    assert trainer.skipped == 1 and all(np.isfinite(x).all() for x in parameters(trainer).values())

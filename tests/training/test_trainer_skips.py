"""Values that are not finite: ``--on-nan skip`` leaves out single steps, and the message says whose they are."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.data import ArrayDataset
from mpiddp.training import trainer as trainer_module
from mpiddp.training.build import build_trainer
from mpiddp.training.config import Config
from mpiddp.training.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

STEPS, BATCH = 5, 4


def data(broken: int = 0) -> ArrayDataset:
    """Return images for STEPS steps, the first ``broken`` of them NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * BATCH, 784)).astype(np.float32)
    x[:broken] = np.nan
    return ArrayDataset(x, np.arange(len(x)) % 10)


def multiply_gradient(parameter, factor) -> None:
    """Multiply the gradient before DDP's own hook sends it."""
    own = parameter.post_accumulate_grad_hooks
    parameter.post_accumulate_grad_hooks = {-1: lambda p: p.grad.__imul__(np.float32(factor())), **own}


def make(broken: int = 0, **options) -> Trainer:
    defaults = {"model": "mlp", "on_nan": "skip", "batch_size": BATCH, "epochs": 9}
    return build_trainer(Config(**{**defaults, **options}), (data(broken), data()))


def test_a_sample_that_is_no_number_costs_its_steps(world):
    trainer = make(broken=1)
    trainer.fit(4)
    assert (trainer.step, trainer.skipped) == (4 * STEPS, 4)
    assert all(np.isfinite(each.loss) for each in trainer.history)


@pytest.mark.parametrize(("accumulate", "n"), [(1, STEPS), (2, 3)])
def test_an_epoch_that_is_left_out_ends_the_run(world, accumulate, n):
    """Windows count as steps."""
    trainer = make(broken=STEPS * BATCH, accumulate=accumulate)
    said = rf"^{n} steps in a row were left out: the loss is not finite on rank 0.* at step {n} \(epoch 1\), with"
    with pytest.raises(FloatingPointError, match=said):
        trainer.fit(9)
    assert trainer.skipped == n - 1 and not trainer.history


def test_long_epochs_end_sooner_and_across_a_checkpoint(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 4)
    trainer = make(broken=STEPS * BATCH)
    trainer.stop = lambda: trainer.step == 2
    trainer.fit(9)
    assert (trainer.step, trainer.skipped) == (3, 3)
    resumed = make(broken=STEPS * BATCH)
    resumed.load_state_dict(trainer.state_dict(), trainer.arrays())
    assert resumed.skipped == 3
    with pytest.raises(FloatingPointError, match=r"^4 steps in a row .* at step 4 \(epoch 1\)"):
        resumed.fit(9)


def test_steps_that_are_made_in_between_begin_the_row_anew(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 3)
    trainer = make()
    healthy = trainer.loss_fn
    trainer.loss_fn = lambda output, y: healthy(output, y) * (1.0 if trainer.step % 3 == 2 else float("nan"))
    trainer.fit(3)
    assert trainer.skipped == 2 * STEPS and trainer.step == 3 * STEPS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whose_gradient_is_not_finite_is_named(world):
    trainer, guilty = make(on_nan="stop"), world.size - 1
    spoilt = np.inf if world.rank == guilty else 1
    bias = trainer.model.module.layers[1].bias
    before = bias.data.copy()
    multiply_gradient(bias, lambda: spoilt if trainer.step == 2 else 1)
    with pytest.raises(FloatingPointError, match=rf"gradient of .* is not finite at step 3 .*that of rank {guilty},"):
        trainer.fit(1)
    assert np.isfinite(bias.data).all() and not np.array_equal(bias.data, before)

"""Values that are not finite: ``--on-nan skip`` leaves out single steps, and the message says whose they are."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.training import Config, Trainer
from mpiddp.training import trainer as trainer_module
from mpiddp.training.build import build_trainer
from mpiddp.training.train_step import NaiveAveraging

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

STEPS, BATCH = 5, 4


def data(broken: int = 0) -> ArrayDataset:
    """Return images for STEPS steps, the first ``broken`` of them NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * BATCH, 784)).astype(np.float32)
    x[:broken] = np.nan
    return ArrayDataset(x, np.arange(len(x)) % 10)


def make(broken: int = 0, **options) -> Trainer:
    defaults = {"model": "mlp", "on_nan": "skip", "batch_size": BATCH, "epochs": 9}
    return build_trainer(Config(**{**defaults, **options}), (data(broken), data()))


def test_a_sample_that_is_no_number_costs_its_steps(world):
    trainer = make(broken=1)
    trainer.fit(4)
    assert (trainer.step, trainer.skipped) == (4 * STEPS, 4)
    assert all(np.isfinite(each.loss) for each in trainer.history)


def test_an_epoch_that_is_left_out_ends_the_run(world):
    trainer = make(broken=STEPS * BATCH)
    said = (
        rf"^{STEPS} steps in a row were left out: the loss is not finite on rank 0.* at step {STEPS} \(epoch 1\), with"
    )
    with pytest.raises(FloatingPointError, match=said):
        trainer.fit(9)
    assert trainer.skipped == STEPS - 1 and not trainer.history


def test_windows_count_as_steps(world):
    trainer = make(broken=STEPS * BATCH, accumulate=2)
    with pytest.raises(FloatingPointError, match=r"^3 steps in a row"):
        trainer.fit(9)


def test_long_epochs_end_sooner_and_across_a_checkpoint(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 4)
    trainer = make(broken=STEPS * BATCH)
    trainer.stop = lambda: trainer.step == 2
    trainer.fit(9)
    assert (trainer.step, trainer.skipped) == (3, 3)
    resumed = make(broken=STEPS * BATCH)
    resumed.load_state_dict(trainer.state_dict(), trainer.arrays())
    with pytest.raises(FloatingPointError, match=r"^4 steps in a row .* at step 4 \(epoch 1\)"):
        resumed.fit(9)


def test_steps_that_are_made_in_between_begin_the_row_anew(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 3)
    trainer = make()
    healthy = trainer.loss_fn
    trainer.loss_fn = lambda output, y: healthy(output, y) * (1.0 if trainer.step % 3 == 2 else float("nan"))
    trainer.fit(3)
    assert trainer.skipped == 2 * STEPS and trainer.step == 3 * STEPS


def test_gradients_that_are_not_finite_end_the_run_too(world):
    trainer = make()
    trainer.model.module.layers[1].bias.register_hook(lambda grad: grad * np.float32(np.inf))
    with pytest.raises(FloatingPointError, match=rf"^{STEPS} steps in a row .*gradient of .* at step {STEPS} "):
        trainer.fit(9)


class Cusp(nn.Module):
    """A finite loss whose gradient is not, where a sample says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(np.ones((1, 1), np.float32)), nn.Parameter(np.ones(1, np.float32))

    def forward(self, x):
        # sqrt at 0 is 0, and its derivative infinite: 0 * inf is NaN.
        return x @ self.weight + self.other + (self.weight * (x.max() < 5)).sum() ** 0.5


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("average", ["ddp", "naive"])
def test_whose_gradient_is_not_finite_is_named(world, average):
    x = np.ones((8 * world.size, 1), np.float32)
    guilty = world.size - 1
    x[2 * world.size + guilty] = 9.0  # the third batch, whose last rank gets it
    dataset = ArrayDataset(x, np.ones((len(x), 1), np.float32))
    model = NaiveAveraging(Cusp()) if average == "naive" else dist.DistributedDataParallel(Cusp())
    sampler = GlobalBatchSampler(dataset, world.size, shuffle=False)
    optimizer = SGD(model.module.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_sampler=sampler)
    trainer = Trainer(model, optimizer, F.mse_loss, loader, correct_fn=lambda o, t: 0)
    with pytest.raises(
        FloatingPointError, match=f"gradient of weight is not finite at step 3 .*that of rank {guilty},"
    ):
        trainer.fit(1)
    assert np.isfinite(model.module.weight.data).all()

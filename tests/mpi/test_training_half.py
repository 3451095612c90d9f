"""Training in half precision, and values that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.training import Trainer
from mpiddp.training.build import build_trainer
from mpiddp.training.train_step import NaiveAveraging

from .configured import EPOCHS, configured, data, everybody, trained

pytestmark = pytest.mark.once


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_half_precision_trains_alike_on_all_ranks(world, dtype, model):
    pytest.importorskip("ml_dtypes")
    options = {"model": model, "lr": 0.02, "loss_scale": 256.0}
    single, half = trained(**options), trained(**options, dtype=dtype)
    found = everybody([x.tobytes() for x in half.model.module.state_dict().values()])
    assert all(theirs == found[0] for theirs in found)
    assert all(p.dtype == np.float32 for p in half.model.module.parameters())
    assert half.skipped == 0 and half.history[0].loss != single.history[0].loss
    np.testing.assert_allclose(half.history[0].loss, single.history[0].loss, rtol=0.05)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_too_large_a_scale_comes_down_and_the_same_steps_are_left_out_on_all_ranks(world):
    trainer = build_trainer(configured(dtype="float16", loss_scale=2.0**24, lr=0.01), data())
    before = [p.data.copy() for p in trainer.model.module.parameters()]
    seen = []

    def note(_):
        unchanged = all(
            np.array_equal(p.data, x) for p, x in zip(trainer.model.module.parameters(), before, strict=True)
        )
        seen.append((trainer.scaler.scale, trainer.skipped, unchanged))

    trainer.callbacks["step_end"].append(note)
    trainer.fit(EPOCHS)
    assert all(theirs == seen for theirs in everybody(seen))
    assert 2 < trainer.skipped < len(seen) == trainer.step
    for step, (scale, skipped, unchanged) in enumerate(seen, 1):
        assert scale == 2.0 ** (24 - skipped)
        assert unchanged == (skipped == step)


def test_the_scale_grows(world):
    trainer = trained(dtype="float16", loss_scale=4.0, loss_scale_steps=3)
    assert trainer.step == 16 and trainer.skipped == 0 and trainer.scaler.scale == 4.0 * 2**5


def test_a_gradient_that_no_scale_mends_stops(world):
    trainer = build_trainer(configured(dtype="float16", loss_scale=2.0), data())
    broken = trainer.model.module.layers[1].bias
    broken.register_hook(lambda grad: grad * np.float32(np.nan))
    with pytest.raises(FloatingPointError, match=r"averaged gradient of layers\.1\.bias is not finite at step 2"):
        trainer.fit(1)
    assert trainer.skipped == 1


def test_small_gradients_need_the_scale(world):
    """Losses divided by 2 ** 26 have float16 gradients of zero, unless they are scaled."""

    def moved(scale: float) -> float:
        config = configured(dtype="float16", loss_scale=scale, epochs=1, lr=2.0**20)
        trainer = build_trainer(config, data())
        loss_fn = trainer.loss_fn
        trainer.loss_fn = lambda output, y: loss_fn(output, y) * 2.0**-26
        before = trainer.model.module.layers[1].weight.data.copy()
        trainer.fit(1)
        return float(np.abs(trainer.model.module.layers[1].weight.data - before).max())

    assert moved(1.0) == 0 < moved(2.0**26)


class Cusp(nn.Module):
    """A finite loss whose gradient is not, where a sample says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(np.ones((1, 1), np.float32)), nn.Parameter(np.ones(1, np.float32))

    def forward(self, x):
        # sqrt at 0 is 0, and its derivative infinite: 0 * inf is NaN.
        return x @ self.weight + self.other + (self.weight * (x.max() < 5)).sum() ** 0.5


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

"""Training on several ranks: the first loss, the same bits on all, batch norms, and values that are not finite."""

import dataclasses

import numpy as np
import pytest
from harness.configured import BATCH, SAMPLES, SEED, batches, configured, data, distance, trained
from harness.world import everybody

from mpiddp import elastic, nn
from mpiddp.data import ArrayDataset, GlobalBatchSampler
from mpiddp.errors import DistError
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.parallel import SyncBatchNorm
from mpiddp.training import trainer as trainer_module
from mpiddp.training.build import build_module, build_trainer
from mpiddp.training.config import Config, UsageError
from mpiddp.training.models import MLP, ResNet
from mpiddp.training.trainer import Trainer

pytestmark = pytest.mark.mpi


def test_first_loss_agrees_to_rounding(world):
    # No step has been made that could have amplified rounding: every digit but the last must be right.
    trainer = trained(epochs=1, batch_size=SAMPLES)
    nn.manual_seed(SEED)
    images, labels = data()[0].arrays
    np.testing.assert_allclose(trainer.history[0].loss, F.nll_loss(MLP(0.0)(images), labels).item(), rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"model": "resnet"}, {"model": "resnet", "accumulate": 2}], ids=str
)
def test_all_ranks_hold_the_same_bits(world, options):
    """Also ranks without a sample of a batch, and their buffers."""
    trainer = trained(**options)
    same = [dataclasses.replace(m, epoch_s=0, test_s=0, samples_per_s=0) for m in trainer.history]
    for mine in ([x.tobytes() for x in trainer.model.module.state_dict().values()], same):
        assert everybody(mine) == [mine] * world.size


def test_ranks_drop_different_units(world):
    trainer = build_trainer(configured(dropout=0.5), data())
    x = data()[0].arrays[0][:4]
    assert len(set(everybody(trainer.model.module(x).data.tobytes()))) == world.size


def test_moments_come_in_order_on_all_ranks(world):
    trainer, seen = build_trainer(configured(batch_size=15), data()), []
    for ended in trainer.moments(2):
        assert trainer.model.module.training and len(trainer.history) == trainer.epoch
        seen.append((ended, trainer.epoch if ended == "epoch" else trainer.step))
    assert seen == [("step", 1), ("step", 2), ("epoch", 1), ("step", 3), ("step", 4), ("epoch", 2)]


def test_loss_that_is_no_number_stops_all_ranks_and_names_one(world):
    train, test = data()
    images, labels = train.arrays
    guilty = world.size - 1
    config = configured(batch_size=world.size)
    order = np.concatenate(list(GlobalBatchSampler(train, config.batch_size, 1, 0, seed=config.seed)))
    broken = images.copy()
    broken[order[2 * config.batch_size + guilty]] = np.nan  # the third batch, whose last rank gets it
    trainer = build_trainer(config, (ArrayDataset(broken, labels), test))
    with pytest.raises(FloatingPointError, match=rf"rank {guilty} at step 3 \(epoch 1\), with finite parameters"):
        list(trainer.moments(1))


def test_divergence_names_the_parameters(world):
    trainer = build_trainer(configured(), data())
    trainer.model.module.layers[7].bias.data[0] = np.inf
    with pytest.raises(FloatingPointError, match=r"at step 1 .*not finite: layers\.7\.bias"):
        list(trainer.moments(1))


def test_spares_are_refused_where_they_cannot_help(world):
    elastic.check_spares(0)
    with pytest.raises(DistError, match="spares need ranks that live on when one dies: start with Open MPI's"):
        elastic.check_spares(1)
    with pytest.raises(UsageError, match=r"running statistics of batch norms .* give --sync-batchnorm"):
        build_module(Config(model="resnet", spares=1))
    build_module(Config(model="resnet", spares=1, sync_batchnorm=True))


def plain_resnet(accumulate: int) -> list[np.ndarray]:
    """Train the residual network on whole batches, as one rank would."""
    nn.manual_seed(SEED)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    listed = batches(0)
    for start in range(0, len(listed), accumulate):
        window = listed[start : start + accumulate]
        for x, y in window:
            (F.cross_entropy(model(x), y) * (len(y) / sum(len(y) for _, y in window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error")  # as of an empty batch
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sync_batchnorm_is_batch_norm_of_the_whole_batch(world, accumulate):
    options = {"model": "resnet", "epochs": 1, "accumulate": accumulate, "sync_batchnorm": True}
    trainer = trained(**options)
    assert any(isinstance(module, SyncBatchNorm) for module in trainer.model.module.modules())
    found, expected = list(trainer.model.module.state_dict().values()), plain_resnet(accumulate)
    assert distance(found, expected) < 3e-3
    if world.size > 1:
        other = trained(**options | {"sync_batchnorm": False}).model.module.state_dict().values()
        assert distance(list(other), expected) > 1e-2, "or this test could not fail"


STEPS = 5


def few(broken: int = 0) -> ArrayDataset:
    """Return images for STEPS steps, the first ``broken`` of them NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * BATCH, 784)).astype(np.float32)
    x[:broken] = np.nan
    return ArrayDataset(x, np.arange(len(x)) % 10)


def skipping(broken: int = 0, **options) -> Trainer:
    return build_trainer(configured(**{"on_nan": "skip", "epochs": 9, **options}), (few(broken), few()))


def test_a_sample_that_is_no_number_costs_its_steps(world):
    trainer = skipping(broken=1)
    list(trainer.moments(4))
    assert (trainer.step, trainer.skipped) == (4 * STEPS, 4)
    assert all(np.isfinite(each.loss) for each in trainer.history)


@pytest.mark.parametrize(("accumulate", "n"), [(1, STEPS), (2, 3)])
def test_an_epoch_that_is_left_out_ends_the_run(world, accumulate, n):
    """Windows count as steps."""
    trainer = skipping(broken=STEPS * BATCH, accumulate=accumulate)
    said = rf"^{n} steps in a row were left out: the loss is not finite on rank 0.* at step {n} \(epoch 1\), with"
    with pytest.raises(FloatingPointError, match=said):
        list(trainer.moments(9))
    assert trainer.skipped == n - 1 and not trainer.history


def test_long_epochs_end_sooner_and_across_a_checkpoint(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 4)
    trainer = skipping(broken=STEPS * BATCH)
    trainer.stop = lambda: trainer.step == 2
    list(trainer.moments(9))
    assert (trainer.step, trainer.skipped) == (3, 3)
    resumed, state = skipping(broken=STEPS * BATCH), trainer.state_dict()
    with pytest.raises(KeyError, match="step"):
        resumed.load_state_dict({name: value for name, value in state.items() if name != "step"})
    resumed.load_state_dict(state)
    assert resumed.skipped == 3
    with pytest.raises(FloatingPointError, match=r"^4 steps in a row .* at step 4 \(epoch 1\)"):
        list(resumed.moments(9))


def test_steps_that_are_made_in_between_begin_the_row_anew(world, monkeypatch):
    monkeypatch.setattr(trainer_module, "MAX_SKIPPED", 3)
    trainer = skipping()
    healthy = trainer.loss_fn
    trainer.loss_fn = lambda output, y: healthy(output, y) * (1.0 if trainer.step % 3 == 2 else float("nan"))
    list(trainer.moments(3))
    assert trainer.skipped == 2 * STEPS and trainer.step == 3 * STEPS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whose_gradient_is_not_finite_is_named(world):
    trainer, guilty = skipping(on_nan="stop"), world.size - 1
    bias = trainer.model.module.layers[1].bias
    before = bias.data.copy()

    def spoil(parameter):
        if trainer.step == 2 and world.rank == guilty:
            parameter.grad *= np.float32(np.inf)

    bias.post_accumulate_grad_hooks = {-1: spoil, **bias.post_accumulate_grad_hooks}  # before DDP sends it
    with pytest.raises(FloatingPointError, match=rf"gradient of .* is not finite at step 3 .*that of rank {guilty},"):
        list(trainer.moments(1))
    assert np.isfinite(bias.data).all() and not np.array_equal(bias.data, before)

"""Training on several ranks: the first loss, the same bits on all, and errors that name a rank."""

import dataclasses

import numpy as np
import pytest
from harness.configured import SAMPLES, SEED, configured, data, trained
from harness.world import everybody

from mpiddp import nn
from mpiddp.data import ArrayDataset, GlobalBatchSampler
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.training import run
from mpiddp.training.build import build_module, build_trainer
from mpiddp.training.config import Config, UsageError
from mpiddp.training.models import MLP

pytestmark = pytest.mark.mpi


def test_first_loss_agrees_to_rounding(world):
    # No step has been made that could have amplified rounding: every digit but the last must be right.
    trainer = trained(epochs=1, batch_size=SAMPLES)
    nn.manual_seed(SEED)
    images, labels = data()[0].arrays
    np.testing.assert_allclose(trainer.history[0].loss, F.nll_loss(MLP(0.0)(images), labels).item(), rtol=1e-6)


def test_all_ranks_hold_the_same_bits(world):
    trainer = trained(dropout=0.5)
    same = [dataclasses.replace(m, epoch_s=0, test_s=0, samples_per_s=0) for m in trainer.history]
    for mine in ([x.tobytes() for x in trainer.model.module.state_dict().values()], same):
        assert everybody(mine) == [mine] * world.size


def test_ranks_drop_different_units(world):
    trainer = build_trainer(configured(dropout=0.5), data())
    x = data()[0].arrays[0][:4]
    assert len(set(everybody(trainer.model.module(x).data.tobytes()))) == world.size


def test_callbacks_are_called_in_order_on_all_ranks(world):
    seen = []
    trainer = build_trainer(configured(batch_size=15), data())
    trainer.callbacks["epoch_begin"].append(lambda t: seen.append(("begin", t.epoch, t.step)))
    trainer.callbacks["step_end"].append(lambda t: seen.append(("step", t.step, t.model.module.training)))
    trainer.callbacks["step_end"].append(lambda t: seen.append(("second", t.step)))
    trainer.callbacks["epoch_end"].append(lambda t: seen.append(("end", t.epoch, len(t.history))))
    trainer.fit(2)
    expected = []
    for epoch in range(2):
        expected.append(("begin", epoch, 2 * epoch))
        for step in (2 * epoch + 1, 2 * epoch + 2):
            expected += [("step", step, True), ("second", step)]
        expected.append(("end", epoch + 1, epoch + 1))
    assert seen == expected


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
        trainer.fit(1)


def test_divergence_names_the_parameters(world):
    trainer = build_trainer(configured(), data())
    trainer.model.module.layers[7].bias.data[0] = np.inf
    with pytest.raises(FloatingPointError, match=r"at step 1 .*not finite: layers\.7\.bias"):
        trainer.fit(1)


def test_batch_smaller_than_the_ranks_is_refused(world):
    run.check_request(Config(batch_size=world.size), world.size)
    if world.size > 1:
        with pytest.raises(UsageError, match=f"give {world.size} or more, or start fewer"):
            run.check_request(Config(batch_size=world.size - 1), world.size)


def test_spares_are_refused_where_they_cannot_help(world):
    with pytest.raises(UsageError, match="--spares 1 needs ranks that live on when one dies: start with Open MPI's"):
        run.check_request(Config(spares=1), world.size)
    with pytest.raises(UsageError, match=r"running statistics of batch norms .* give --sync-batchnorm"):
        build_module(Config(model="resnet", spares=1))
    build_module(Config(model="resnet", spares=1, sync_batchnorm=True))

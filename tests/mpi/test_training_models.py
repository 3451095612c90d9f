"""A user's models in a training run, and DistributedDataParallel's options for them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.training import Config, UsageError
from mpiddp.training.build import build_trainer

from .configured import SAMPLES, configured, data, everybody, trained

pytestmark = pytest.mark.once


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


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    module = ModuleType("models_of_ones_own")
    vars(module).update(Unused=Unused, Apart=Apart, Regression=Regression, wrong=dict, number=3)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def own(name: str, **options) -> Config:
    return configured(**{"model": f"models_of_ones_own:{name}", "dropout": None, "epochs": 1, **options})


def test_a_model_brings_its_own_loss(world):
    trainer = build_trainer(own("Regression", lr=1e-4), data())
    trainer.fit(1)
    assert trainer.history[0].accuracy == 0.5 and trainer.history[0].loss > 5
    with pytest.raises(UsageError, match="loss_fn of its own"):
        build_trainer(own("Regression", label_smoothing=0.1), data())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unusd", "'Unusd' is not in models_of_ones_own; did you mean Unused?"),
        ("number", "'number' is no callable"),
        ("wrong", "has to return an mpiddp.nn.Module, got dict"),
    ],
)
def test_what_is_no_model_is_refused(world, name, said):
    with pytest.raises(UsageError, match=said):
        build_trainer(own(name), data())


def test_unknown_module_is_named(world):
    with pytest.raises(UsageError, match="there is no module nowhere"):
        build_trainer(configured(model="nowhere:Model", dropout=None), data())


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_allowed_where_asked(world, option):
    # A batch that gives every rank a sample: one without any is not asked for its gradients.
    trainer = build_trainer(own("Unused", batch_size=SAMPLES, **{option: True}), data())
    trainer.fit(1)
    assert trainer.model.module.idle.weight.grad is None
    trainer = build_trainer(own("Unused", batch_size=SAMPLES), data())
    with pytest.raises(RuntimeError, match="not used in producing loss"):
        trainer.fit(1)


def test_buckets_that_nobody_uses_are_sent_unless_told_otherwise(world):
    def sent(**options):
        trainer = build_trainer(own("Unused", batch_size=SAMPLES, bucket_cap_mb=1e-5, **options), data())
        buckets = []

        def counting(_, bucket):
            buckets.append([p.shape for p in bucket.parameters()])
            return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)

        trainer.model.register_comm_hook(None, counting)
        trainer.fit(1)
        assert trainer.model.module.idle.weight.grad is None
        return sorted(shape for bucket in buckets for shape in bucket)

    everything, used = [(3,), (3, 3), (10,), (10, 784)], [(10,), (10, 784)]
    assert sent(find_unused_parameters=True) == everything
    assert sent(find_unused_parameters=True, skip_all_reduce_unused_params=True) == used


def test_initial_values_are_the_first_ranks_unless_told_otherwise(world):
    def found(**options):
        module = build_trainer(own("Apart", **options), data()).model.module
        mean = float(module.layer.bias.data.mean())
        return [round(each - everybody(mean)[0]) for each in everybody(mean)], everybody(float(module.rank[0]))

    alike, ranks = [0] * world.size, list(range(world.size))
    assert found() == (alike, [0.0] * world.size)
    assert found(init_sync=False) == (ranks, ranks)
    assert found(broadcast_buffers=False) == (alike, ranks)


@pytest.mark.parametrize(
    ("options", "buckets"),
    [({}, 1), ({"bucket_cap_mb": 0.2}, 3), ({"bucket_cap_mb_list": (0.01, 0.3)}, 3), ({"bucket_cap_mb": 99.0}, 1)],
    ids=str,
)
def test_bucket_caps(world, options, buckets):
    trainer = trained(epochs=1, **options)
    sizes = trainer.model.bucket_sizes_bytes()
    assert len(sizes) == buckets, sizes
    caps = options.get("bucket_cap_mb_list", (options.get("bucket_cap_mb", 25),))
    assert trainer.model.logging_data()["bucket_cap_bytes"] == int(caps[-1] * 2**20)

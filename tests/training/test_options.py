"""Each option of a training run against torch or a plain loop on one rank, which know nothing of ranks."""

import functools
import importlib.util

import numpy as np
import pytest
from harness.configured import (
    BATCH,
    BY_EPOCH,
    EPOCHS,
    SEED,
    batches,
    configured,
    data,
    distance,
    rate,
    trained,
    windows,
)

import mpiddp as dist
from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD, Adam
from mpiddp.training.build import build_trainer
from mpiddp.training.config import Config, UsageError
from mpiddp.training.models import MLP
from mpiddp.training.ranks import raise_on_all_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


@functools.cache
def torchs(config: Config) -> list[np.ndarray]:
    """Train torch's network with torch's optimizers as configured, on rank 0, and broadcast the result."""
    # The others sleep meanwhile, where a broadcast would keep their cores busy.
    found = [raise_on_all_ranks(lambda: trained_by_torch(config) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def trained_by_torch(config: Config) -> list[np.ndarray]:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    nn.manual_seed(config.seed)
    state = {name: torch.tensor(x) for name, x in MLP(0.0).state_dict().items()}
    layers = torch.nn.Sequential(
        torch.nn.Flatten(),
        *(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Identity()),
        *(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Identity()),
        torch.nn.Linear(256, 10),
    )
    layers.load_state_dict({name.removeprefix("layers."): x for name, x in state.items()})
    adam = {"betas": (config.momentum, 0.999)}
    kind, options = {
        "sgd": (torch.optim.SGD, {"momentum": config.momentum}),
        "adam": (torch.optim.Adam, adam),
        "adamw": (torch.optim.AdamW, adam),
        OWN_ADAM: (torch.optim.Adam, {"betas": (0.5, 0.9)}),
    }[config.optimizer]
    optimizer = kind(layers.parameters(), lr=config.lr, weight_decay=config.weight_decay, **options)
    steps = [window for epoch in range(config.epochs) for window in windows(epoch, config.accumulate)]
    for step, (x, y) in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step, len(steps))
        loss = torch.nn.functional.cross_entropy(layers(torch.tensor(x)), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), config.clip_norm)
        optimizer.step()
    return [p.detach().numpy() for p in layers.parameters()]


def adam(params, lr):
    return Adam(params, lr, betas=(0.5, 0.9))


OWN_ADAM = f"{__name__}:adam"
OPTIONS = {
    "seed": {"batch_size": BATCH, "momentum": 0.0},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.3},
    "adam": {"optimizer": "adam", "lr": 0.001},
    "own optimizer": {"optimizer": OWN_ADAM, "lr": 0.001},
    "adamw": {"optimizer": "adamw", "lr": 0.001, "weight_decay": 3.0},
    "zero": {"optimizer": "adam", "lr": 0.001, "zero": True},
    "clip_norm, accumulated": {"clip_norm": 0.2, "accumulate": 2},
    "warm-up and cosine": {"schedule": "cosine", "warmup_steps": 3, "accumulate": 2},
    "own schedule": {"schedule": BY_EPOCH},
}


def apart(one, two) -> float:
    """Return the distance of two ends of a training, as a share of the way to the second.

    A unit of a ReLU that lies within rounding of its kink changes single parameters by far more than rounding.
    """
    nn.manual_seed(SEED)
    began = [p.data for p in MLP(0.0).parameters()]
    between = sum(float(np.square(x - y).sum()) for x, y in zip(one, two, strict=True))
    return (between / sum(float(np.square(x - y).sum()) for x, y in zip(two, began, strict=True))) ** 0.5


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch to compare with")
@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_torchs(world, name):
    expected = torchs(configured(**OPTIONS[name]))
    found = [p.data for p in trained(**OPTIONS[name]).model.module.parameters()]
    assert apart(found, expected) < 0.03
    assert apart(torchs(configured()), expected) > 0.5, "or this test could not fail"


def by_hand(average) -> list[np.ndarray]:
    """Train on all ranks by a loop that knows nothing of Trainer."""
    nn.manual_seed(SEED)
    model = average(MLP(0.0))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            with model.weighted(len(y[mine]), len(y)):
                if len(y[mine]):
                    F.nll_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.data for p in model.parameters()]


def powersgd(module):
    model = dist.DistributedDataParallel(module)
    model.register_comm_hook(dist.PowerSGDState(None, 2, 3, random_seed=SEED), dist.powerSGD_hook)
    return model


def test_own_hook_is_used(world):
    expected = by_hand(powersgd)
    found = trained(average=f"{__name__}:powersgd").model.module.parameters()
    assert all(np.array_equal(p.data, x) for p, x in zip(found, expected, strict=True))
    assert distance(expected, by_hand(dist.DistributedDataParallel)) > 0, "or this test could not fail"


def test_power_sgd_dies_with_its_rank(world):
    with pytest.raises(UsageError, match="--spares: with PowerSGD a rank's remainder of gradients"):
        trained(average=f"{__name__}:powersgd", spares=1)


def test_power_sgd_forgets_a_gradient_that_is_not_finite(world):
    config = configured(average=f"{__name__}:powersgd", on_nan="skip")
    trainer = build_trainer(config, data())
    loss_fn = trainer.loss_fn
    trainer.loss_fn = lambda output, y: loss_fn(output, y) * (np.float32(np.inf) if trainer.step == 4 else 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        list(trainer.moments(EPOCHS))
    assert trainer.skipped == 1 and np.isfinite(trainer.history[-1].loss)
    assert all(np.isfinite(error).all() for error in trainer.compression.error_dict.values())

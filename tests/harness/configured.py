"""Training runs as a configuration says, on few samples, and their batches for a plain loop."""

import functools

import numpy as np

from mpiddp.data import ArrayDataset, GlobalBatchSampler, digits
from mpiddp.optim.lr_scheduler import MultiStepLR
from mpiddp.training.build import build_trainer
from mpiddp.training.config import Config
from mpiddp.training.trainer import Trainer

SAMPLES, BATCH, EPOCHS = 29, 4, 2
"""29 = 7 * 4 + 1: the last batch leaves all ranks but one without a sample; 8 batches are windows of 3, 3 and 2."""
SEED = 5


@functools.cache
def data() -> tuple[ArrayDataset, ArrayDataset]:
    train, test = digits(), digits(train=False)
    return ArrayDataset(*train.batch(np.arange(SAMPLES))), ArrayDataset(*test.batch(np.arange(20)))


def configured(**options) -> Config:
    defaults = {"model": "mlp", "dropout": 0.0, "lr": 0.1, "batch_size": BATCH, "epochs": EPOCHS, "seed": SEED}
    return Config(**{**defaults, **options})


def trained(**options) -> Trainer:
    config = configured(**options)
    trainer = build_trainer(config, data())
    list(trainer.moments(config.epochs))
    return trainer


def batches(epoch: int, seed: int = SEED, size: int = BATCH):
    sampler = GlobalBatchSampler(range(SAMPLES), size, num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return [data()[0].batch(indices) for indices in sampler]


def windows(epoch: int, accumulate: int):
    """Yield the samples of each step's batches, as one large batch."""
    listed = batches(epoch)
    for start in range(0, len(listed), accumulate):
        xs, ys = zip(*listed[start : start + accumulate], strict=True)
        yield np.concatenate(xs), np.concatenate(ys)


def by_epoch(optimizer, steps, steps_an_epoch):
    return MultiStepLR(optimizer, range(steps_an_epoch, steps, steps_an_epoch), 0.2)


BY_EPOCH = f"{__name__}:by_epoch"


def rate(config: Config, step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0, in words of our own."""
    warm = config.warmup_steps
    if step < warm:
        return config.lr * (step + 1) / (warm + 1)
    if config.schedule == "cosine":
        share = (step - warm) / (steps - warm)
        return config.lr * 0.5 * (1 + np.cos(np.pi * share))
    if config.schedule == BY_EPOCH:
        return config.lr * 0.2 ** ((step - warm) // (steps // config.epochs))
    return config.lr


def distance(one, two) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(one, two, strict=True))

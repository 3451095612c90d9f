"""Data of ``train``: every kind of ``--data``, fetched and held once a node; and an evaluation that is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_builtin import write_mnist
from harness.world import everybody

import mpiddp as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler, digits, mnist, shared_on_node, synthetic
from mpiddp.data.dataset import fetch
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.parallel import DistributedDataParallel
from mpiddp.training.build import load_data
from mpiddp.training.config import Config, UsageError
from mpiddp.training.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

Array = Any


def whole(part: Any) -> tuple[Array, Array]:
    return fetch(part, np.arange(len(part)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), lambda train: digits(train)),
        (Config(seed=4), lambda train: digits(train, seed=4)),
        (Config(data="synthetic"), lambda train: synthetic(4096 if train else 1024, train=train, noise=2.0)),
    ],
    ids=["digits", "digits, seed", "synthetic"],
)
def test_made_data(world: Any, config: Config, expected: Callable[[bool], ArrayDataset]) -> None:
    for part, train in zip(load_data(config), (True, False), strict=True):
        for mine, theirs in zip(whole(part), expected(train).arrays, strict=True):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        assert world.size == 1 or not part.arrays[0].flags.writeable, "it is the node's"


def test_files_of_ones_own(world: Any, folder: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (30, 28, 28), np.uint8), np.arange(30) % 10
    if world.rank == 0:
        np.savez(folder / "stored.npz", x=images, y=labels)
        np.savez_compressed(folder / "packed.npz", images=images, labels=labels)
    dist.barrier()
    found = []
    for name in (f"npz:{folder}/stored.npz", f"npz:{folder}/packed.npz"):
        train, test = load_data(Config(data=name, seed=3))
        assert (len(train), len(test)) == (27, 3)
        found.append([*whole(train), *whole(test)])
    for other in found[1:]:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))
    x = np.concatenate(found[0][::2])
    assert x.dtype == np.float32 and sorted(x.sum((1, 2, 3))) == pytest.approx(sorted(images.sum((1, 2)) / 255))


def of_size(n: int) -> list[Array]:
    return [np.ones((n, 4), np.float32), np.zeros(n, np.int64)]


def made(train: bool) -> ArrayDataset:
    return ArrayDataset(*shared_on_node(lambda: of_size(20 if train else 5)))


def empty(train: bool) -> ArrayDataset:
    return ArrayDataset(*of_size(0 if train else 5))


def own(train: bool) -> ArrayDataset:
    return ArrayDataset(*of_size(20 + dist.get_rank()))


def fails(train: bool) -> list[int]:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("no such corpus")
    return [1, 2]


def test_a_callable_of_ones_own(world: Any) -> None:
    train, test = load_data(Config(data=f"{__name__}:made"))
    assert (len(train), len(test)) == (20, 5)
    said = rf"--data {__name__}:fails: ValueError: no such corpus \(.*test_build_data\.py, line \d+, in fails\)"
    with pytest.raises(UsageError, match=said):
        load_data(Config(data=f"{__name__}:fails"))
    with pytest.raises(UsageError, match=rf"--data {__name__}:empty gave \(0, 5\) samples"):
        load_data(Config(data=f"{__name__}:empty"))
    if world.size > 1:
        with pytest.raises(UsageError, match=r"gave \(20, 20\) samples .* on rank 0, and \(21, 21\) on rank 1: "):
            load_data(Config(data=f"{__name__}:own"))


def test_missing_files_are_named_on_every_rank(world: Any, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory: '.*none\.npz"):
        load_data(Config(data=f"npz:{folder}/none.npz"))


def test_mnist_is_read_from_its_folder(world: Any, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte .* is neither .*; fetch MNIST's four files: curl"):
        load_data(Config(data="mnist", data_dir=folder))
    dist.barrier()
    if world.rank == 0:
        write_mnist(folder, train=23, test=7, packed=True)
    dist.barrier()
    train, test = load_data(Config(data="mnist", data_dir=folder))
    assert (len(train), len(test)) == (23, 7)
    assert np.array_equal(whole(train)[0], mnist(folder).arrays[0])


@pytest.mark.parametrize(("n", "batch_size"), [(1, 4), (2, 1), (5, 100), (29, 4)])
def test_evaluation_counts_every_sample_once(world: Any, n: int, batch_size: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((n, 6)).astype(np.float32), rng.integers(0, 3, n)
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(-1))
    data = ArrayDataset(x, y)
    sampler = GlobalBatchSampler(data, batch_size * world.size, shuffle=False)
    test = DataLoader(data, batch_sampler=sampler)
    trainer = Trainer(DistributedDataParallel(model), SGD(model.parameters(), lr=0.1), test, test, Config())
    tally = trainer.evaluate()
    scores = model(x)
    assert tally["samples"] == n
    assert tally.mean("loss") == pytest.approx(F.nll_loss(scores, y).item(), rel=1e-5)
    assert tally["correct"] == (scores.data.argmax(1) == y).sum()
    assert everybody(tally.sums.tolist()) == [tally.sums.tolist()] * world.size

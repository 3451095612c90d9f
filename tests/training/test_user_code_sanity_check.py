"""Model, loss and data that do not go together: one sentence, on every rank, before any training."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.data import ArrayDataset, ByteWindows
from mpiddp.training import Config, UsageError
from mpiddp.training.build import build_trainer
from mpiddp.training.ranks import raise_on_all_ranks
from mpiddp.training.user_code import sanity_check

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

N = 12
LABELS = np.arange(N) % 10


def images(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones((N, *shape), dtype)


GOOD = ArrayDataset(images(1, 28, 28), LABELS)


class Scores(nn.Module):
    """A user's model, which returns what its subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def scores(self, x: Any) -> Any:
        return self.layer(x.reshape(len(x), -1))

    forward = scores


class Several(Scores):
    def forward(self, x: Any) -> Any:
        return self.scores(x), 3


class Mixes(Scores):
    def forward(self, x: Any) -> Any:
        return self.scores(x)[:1]


class NoTensor(Scores):
    @staticmethod
    def loss_fn(output: Any, targets: Any) -> Any:
        return 3.0


class CountsWrongly(Scores):
    @staticmethod
    def correct_fn(output: Any, targets: Any) -> Any:
        return output


class Fails:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"sample-{index}")


BAD_BATCH = "the first samples cannot be made a batch: "
PAIRS = r"expected samples \(input, target\), found "
DATA = {
    "too small": (ArrayDataset(images(1, 8, 8), LABELS), "net", r"takes images \(1, 28, 28\), .* float32 \(1, 8, 8\)"),
    "too large": (ArrayDataset(images(1, 64, 64), LABELS), "mlp", r"takes .*784 numbers, .* float32 \(1, 64, 64\)"),
    "words": ([("a", "b")] * N, "mlp", "takes images .* has training samples of type list"),
    "numbers": ([1] * N, "mlp", PAIRS),
    "no labels": (ArrayDataset(images(1, 28, 28)), "mlp", PAIRS),
    "ragged": ([(images(1, 2 + i)[0], 0) for i in range(N)], "mlp", f"{BAD_BATCH}ValueError: default_collate needs"),
    "fails": (Fails(), "mlp", rf"{BAD_BATCH}KeyError: 'sample-0' \(.*sanity_check\.py, line \d+, in __getitem__\)"),
    "floats": (ArrayDataset(images(784), LABELS / 2), "mlp", r"targets float64 \(\): TypeError: expected int"),
    "too long": (ByteWindows(np.arange(200, dtype=np.uint8), 50), "transformer", r"takes text, .* int64 \(50,\)"),
}
MODELS = {
    "Several": r"cannot take this: --data digits has training samples float32 \(1, 28, 28\) with targets int64 \(\): ",
    "Mixes": "Error",
    "NoTensor": "AttributeError: 'float' object has no attribute 'item'",
    "CountsWrongly": "TypeError",
}


def try_together(config: Config, train: Any, test: Any) -> None:
    trainer = build_trainer(config, (train, test))
    raise_on_all_ranks(lambda: sanity_check(trainer, config, (train, test)))


@pytest.mark.parametrize("name", DATA)
def test_data_that_a_model_cannot_take(world, name):
    train, model, said = DATA[name]
    config = Config(model=model, data="text:mine" if model == "transformer" else "npz:mine", context=40)
    with pytest.raises(UsageError, match=rf"^--(data npz:mine, training data: .*|model {model} .*){said}"):
        try_together(config, train, train)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_ones_own(world, name):
    config = Config(model=f"{__name__}:{name}")
    with pytest.raises(UsageError, match=f"^--.*{MODELS[name]}"):
        try_together(config, GOOD, GOOD)


def test_the_data_for_the_test_are_tried_too(world):
    small = ArrayDataset(images(1, 20, 20), LABELS)
    with pytest.raises(UsageError, match=r"has test samples float32 \(1, 20, 20\)"):
        try_together(Config(), GOOD, small)


def test_what_fails_on_one_rank_is_known_on_all(world):
    last = world.size - 1
    data = ArrayDataset(images(1, 20, 20), LABELS) if world.rank == last else GOOD
    where = rf" \(on rank {last}\)$" if last else ""
    with pytest.raises(UsageError, match=f"has training samples .*{where}"):
        try_together(Config(), data, GOOD)


def test_a_model_without_parameters_is_refused(world, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Empty", nn.Flatten, raising=False)
    with pytest.raises(UsageError, match=r"--model .*:Empty has no parameter to train"):
        build_trainer(Config(model=f"{__name__}:Empty"), (GOOD, GOOD))


@pytest.mark.parametrize("options", [{}, {"model": "resnet"}])
def test_a_trial_changes_nothing(world, options):
    config = Config(dropout=0.3, batch_size=4, epochs=1, **options)
    ends = []
    for tries in (0, 2):
        trainer = build_trainer(config, (GOOD, GOOD))
        for _ in range(tries):
            sanity_check(trainer, config, (GOOD, GOOD))
        assert trainer.model.module.training
        trainer.fit(1)
        ends.append({name: x.tobytes() for name, x in trainer.arrays().items()})
    assert ends[0] == ends[1]


def test_a_model_that_fails_on_one_rank_is_told_on_all(world, monkeypatch):
    def make() -> nn.Module:
        if world.rank == world.size - 1:
            raise FileNotFoundError("no weights here")
        return Scores()

    monkeypatch.setattr(sys.modules[__name__], "make", make, raising=False)
    with pytest.raises(UsageError, match=r":make: FileNotFoundError: no weights here \(.*in make\)"):
        build_trainer(Config(model=f"{__name__}:make"), (GOOD, GOOD))

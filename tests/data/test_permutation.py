from __future__ import annotations

import random

import numpy as np
import pytest

from mpiddp.data.permutation import MAX_LENGTH, randperm

SEEDS = [0, 1, 42, 1234, 2**31, 2**32 - 1, 2**32, 2**40 + 7]


def walked(n: int, seed: int) -> list[int]:
    """The recipe as torch walks it, one swap at a time."""
    words = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, size=n, dtype=np.uint32).tolist()
    p = list(range(n))
    for i in range(n - 1):
        j = i + words[i] % (n - i)
        p[i], p[j] = p[j], p[i]
    return p


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [*range(20), 97, 1437, 60_000])
def test_equals_the_walk(n: int, seed: int) -> None:
    order = randperm(n, seed)
    assert order.dtype == np.int64 and order.shape == (n,)
    assert order.tolist() == walked(n, seed)


@pytest.mark.parametrize("seed", [*SEEDS, -1, -12345])
def test_equals_torch(seed: int) -> None:
    torch = pytest.importorskip("torch")
    for n in [*range(201), 1437, 60_000]:
        theirs = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        assert np.array_equal(randperm(n, seed), theirs.numpy()), n


def test_leaves_global_random_state_alone() -> None:
    np.random.seed(5)
    random.seed(5)
    before = np.random.get_state()[1].copy(), random.getstate()
    randperm(1000, 3)
    assert np.array_equal(np.random.get_state()[1], before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("n", [-1, MAX_LENGTH])
def test_refuses_lengths_of_another_recipe(n: int) -> None:
    with pytest.raises(ValueError, match=f"got {n}"):
        randperm(n, 0)

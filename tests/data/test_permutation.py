import numpy as np
import pytest

from mpiddp.data.permutation import MAX_LENGTH, randperm


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 - 1, 2**32, 2**40 + 7, -1, -12345])
def test_equals_torch(torch, seed: int) -> None:
    for n in [*range(201), 1437, 60_000]:
        theirs = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        assert np.array_equal(randperm(n, seed), theirs.numpy()), n
    assert randperm(n, seed).dtype == np.int64


@pytest.mark.parametrize("n", [-1, MAX_LENGTH])
def test_refuses_lengths_of_another_recipe(n: int) -> None:
    with pytest.raises(ValueError, match=f"got {n}"):
        randperm(n, 0)

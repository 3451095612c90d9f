"""Samplers, and sizes of batches that are none."""

from typing import Any

import numpy as np
import pytest

from mpiddp.data import DataLoader, GlobalBatchSampler, RandomSampler


@pytest.mark.parametrize(
    ("size", "text"), [(128 / 3, "42.6667; pass 42"), (64.0, "64; pass 64"), (np.float32(0.5), "pass 1")]
)
def test_a_float_batch_size_is_refused_with_the_integer_to_use(size: Any, text: str) -> None:
    for make in (lambda: DataLoader(range(10), size), lambda: GlobalBatchSampler(range(10), size, 1, 0)):
        with pytest.raises(TypeError, match=text):
            make()


def test_random_sampler() -> None:
    assert sorted(RandomSampler(range(7), generator=0)) == list(range(7))
    assert list(RandomSampler([])) == [] and len(RandomSampler(range(7))) == 7

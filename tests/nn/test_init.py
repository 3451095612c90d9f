"""Initial values have torch's ranges and spreads."""

import math

import numpy as np
import pytest

from mpiddp import nn


def test_initial_values_have_torchs_ranges() -> None:
    nn.manual_seed(3)
    for layer, fan_in in ((nn.Linear(400, 300), 400), (nn.Conv2d(16, 32, 5), 400)):
        bound = 1 / math.sqrt(fan_in)
        for values in (layer.weight.data, layer.bias.data):
            assert values.dtype == np.float32 and abs(values).max() <= bound and abs(values).max() > 0.9 * bound
        assert abs(layer.weight.data.mean()) < bound * 0.01
        assert abs(layer.weight.data.std() / (bound / math.sqrt(3)) - 1) < 0.02


@pytest.mark.parametrize("name", ["uniform_", "normal_"])
def test_init_spread_is_torchs(torch, name: str) -> None:
    ours, theirs = nn.Parameter(np.empty((120, 30, 3, 3), np.float32)), torch.empty(120, 30, 3, 3)
    getattr(nn.init, name)(ours)
    getattr(torch.nn.init, name)(theirs)
    assert abs(ours.data.std() / theirs.numpy().std() - 1) < 0.03

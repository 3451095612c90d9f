"""The models: the tutorial's network to the letter."""

import numpy as np
import pytest
from harness.oracle import compare_modules, draw

from mpiddp import nn
from mpiddp.training import config
from mpiddp.training.models import MLP, MODELS, Net, ResidualBlock, ResNet


@pytest.mark.parametrize("model", [Net, MLP, ResNet])
def test_dropout_drops_in_training_only(model):
    nn.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((3, 1, 28, 28), dtype=np.float32)
    module = model(dropout=0.5)
    assert not np.array_equal(module(x).data, module(x).data)
    module.eval()
    assert np.array_equal(module(x).data, module(x).data)
    module = model(dropout=0.0)  # also while it trains
    assert np.array_equal(module(x).data, module(x).data)


def test_net_against_torch(torch):
    F = torch.nn.functional

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = torch.nn.Conv2d(1, 10, 5), torch.nn.Conv2d(10, 20, 5)
            self.fc1, self.fc2 = torch.nn.Linear(320, 50), torch.nn.Linear(50, 10)

        def forward(self, x):
            y = F.relu(F.max_pool2d(self.conv2(F.relu(F.max_pool2d(self.conv1(x), 2))), 2))
            return F.log_softmax(self.fc2(F.relu(self.fc1(y.reshape(5, 320)))), dim=1)

    compare_modules(Net(dropout=0.0), Theirs(), draw((5, 1, 28, 28), dtype="float32"))


def test_a_residual_block_adds_to_its_input():
    x, images = draw((5, 4, 6, 6), (5, 1, 13, 12), dtype="float32")
    for block, identity in ((ResidualBlock(4, 4), True), (ResidualBlock(4, 8, stride=2), False)):
        block.norm2.weight.data[...] = 0
        shortcut = block.shortcut(x)
        assert np.array_equal(block(x).data, np.maximum(shortcut if identity else shortcut.data, 0))
    assert ResNet()(images).shape == (5, 10)


def test_the_command_line_knows_the_same_models():
    assert tuple(MODELS) == config.MODELS

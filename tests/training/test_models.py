"""The models: the tutorial's network to the letter."""

from __future__ import annotations

import numpy as np
import pytest
from harness.oracle import compare_modules, draw

from mpiddp import nn
from mpiddp.training import config
from mpiddp.training.models import MLP, MODELS, Net, ResNet


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


def test_net_against_torch():
    torch = pytest.importorskip("torch")
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


def test_the_command_line_knows_the_same_models():
    assert tuple(MODELS) == config.MODELS


@pytest.mark.parametrize("training", [True, False])
def test_resnet_against_torch(training):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional

    def unit(*convolution, **options):
        channels = convolution[1]
        return [torch.nn.Conv2d(*convolution, bias=False, **options), torch.nn.BatchNorm2d(channels)]

    class Block(torch.nn.Module):
        def __init__(self, channels, out, stride=1):
            super().__init__()
            self.conv1, self.norm1 = unit(channels, out, 3, stride=stride, padding=1)
            self.conv2, self.norm2 = unit(out, out, 3, padding=1)
            plain = stride == 1 and channels == out
            self.shortcut = torch.nn.Sequential(*([] if plain else unit(channels, out, 1, stride=stride)))

        def forward(self, x):
            y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            return F.relu(y + self.shortcut(x))

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.stem_norm = unit(1, 4, 3, stride=2, padding=1)
            self.stages = torch.nn.Sequential(Block(4, 4), Block(4, 8, 2))
            self.head = torch.nn.Linear(8, 10)

        def forward(self, x):
            return self.head(self.stages(F.relu(self.stem_norm(self.stem(x)))).mean((2, 3)))

    ours, theirs = ResNet(width=4).train(training), Theirs().train(training)
    compare_modules(ours, theirs, draw((5, 1, 13, 12), dtype="float32"))

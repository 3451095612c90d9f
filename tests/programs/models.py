"""For ``train --model models:plain`` and ``models:normed``."""

from mpiddp import nn


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))

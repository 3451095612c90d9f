"""For ``train --model models:plain`` and ``models:normed``, and ``--average models:compressed``."""

import mpiddp as dist
from mpiddp import nn

compressed_model = None
"""The one that `compressed` has made last."""


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))


def compressed(module):
    global compressed_model
    compressed_model = dist.DistributedDataParallel(module)
    compressed_model.register_comm_hook(dist.PowerSGDState(None, start_powerSGD_iter=9), dist.powerSGD_hook)
    return compressed_model

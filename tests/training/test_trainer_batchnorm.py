"""Batch normalisation in a training run, against a plain loop on one rank: of all ranks, and of each."""

from __future__ import annotations

import numpy as np
import pytest
from harness.configured import SEED, batches, distance, trained
from harness.world import everybody

from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.parallel import SyncBatchNorm
from mpiddp.training.models import ResNet

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


def plain_resnet(accumulate: int) -> list[np.ndarray]:
    """Train the residual network on whole batches, as one rank would."""
    nn.manual_seed(SEED)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    listed = batches(0)
    for start in range(0, len(listed), accumulate):
        window = listed[start : start + accumulate]
        for x, y in window:
            (F.cross_entropy(model(x), y) * (len(y) / sum(len(y) for _, y in window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.filterwarnings("error")  # as of an empty batch
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sync_batchnorm_is_batch_norm_of_the_whole_batch(world, accumulate):
    options = {"model": "resnet", "epochs": 1, "accumulate": accumulate, "sync_batchnorm": True}
    trainer = trained(**options)
    assert any(isinstance(module, SyncBatchNorm) for module in trainer.model.module.modules())
    found, expected = list(trainer.model.module.state_dict().values()), plain_resnet(accumulate)
    assert distance(found, expected) < 3e-3
    if world.size > 1:
        other = trained(**options | {"sync_batchnorm": False}).model.module.state_dict().values()
        assert distance(list(other), expected) > 1e-2, "or this test could not fail"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_without_a_sample_keep_step_with_buffers(world, accumulate):
    trainer = trained(model="resnet", accumulate=accumulate)
    found = everybody([x.tobytes() for x in trainer.model.module.state_dict().values()])
    assert all(theirs == found[0] for theirs in found)

"""DistributedDataParallel: against the plain way, against one process, against torch's DDP on Gloo."""

import contextlib
from typing import Any

import numpy as np
import pytest
from harness.learning import (
    assert_close,
    assert_equal,
    assert_same_bits_everywhere,
    batch,
    gloo,
    gradients,
    mine,
    mlp,
    share,
    step_of,
    torch_mlp,
    twin,
)
from harness.world import World

import mpiddp as dist
from mpiddp import nn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]

DDP = dist.DistributedDataParallel


def nested() -> nn.Module:
    """Return modules in modules, one of them at two depths, and one's weight in another: seven parameters."""
    nn.manual_seed(3)
    twice, tied = nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 7, bias=False)
    tied.weight = twice[0].weight
    deep = nn.Sequential(nn.Linear(5, 7), nn.Sequential(twice, nn.Sequential(nn.BatchNorm1d(7))))
    return nn.Sequential(deep, twice, tied, nn.Sequential(nn.Sequential(nn.Linear(7, 3, bias=False))))


@pytest.mark.parametrize(
    ("options", "buckets"),
    [({}, 1), ({"bucket_cap_mb": 0.0001}, 4), ({"bucket_cap_mb_list": [0.0001, 25]}, 2), ({"bucket_cap_mb": 1e-9}, 7)],
)
def test_gradients_are_those_of_the_plain_way(world: World, options: dict[str, Any], buckets: int) -> None:
    plain = nested()
    ddp = DDP(twin(plain), **options)
    for _ in range(3):
        x, y = mine(world, *batch(world.rng, 4 * world.size))
        for model in (plain, ddp):
            model.zero_grad()
            step_of(model, x, y)
        dist.average_gradients(plain)
        # One addition has one order, and with a bucket for each parameter both reduce the same arrays.
        if buckets == 7 or (world.size <= 2 and "bucket_cap_mb_list" not in options):
            assert_equal(gradients(plain), gradients(ddp.module))
        assert_close(gradients(plain), gradients(ddp.module), rtol=1e-5, atol=1e-7)
        assert_same_bits_everywhere(gradients(ddp))
    assert len(ddp.bucket_sizes_bytes()) == buckets


def test_accumulation_and_steps_are_those_of_torch(world: World) -> None:
    torch = gloo()
    model = mlp()
    theirs = torch.nn.parallel.DistributedDataParallel(torch_mlp(torch, model))
    ours = DDP(model)
    optimizers = [
        each.SGD(ddp.parameters(), lr=0.1, momentum=0.9) for each, ddp in ((optim, ours), (torch.optim, theirs))
    ]
    for kind in ("local", "local", "reduced", "onto an average that stands", "cleared"):
        if kind == "cleared":
            ours.zero_grad(), theirs.zero_grad()
        x, y = mine(world, *batch(world.rng, 3 * world.size))
        with contextlib.ExitStack() as stack:
            if kind == "local":
                stack.enter_context(ours.no_sync()), stack.enter_context(theirs.no_sync())
            step_of(ours, x, y)
            torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-5, atol=1e-6, err_msg=kind)
        if kind != "local":
            for optimizer in optimizers:
                optimizer.step()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                np.testing.assert_allclose(p.data, q.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=kind)


def test_a_group_of_some_ranks(world: World) -> None:
    ranks = list(range(0, world.size, 2))
    group = dist.new_group(ranks)
    if world.rank in ranks:
        ddp = DDP(mlp(), process_group=group)
        x, y = batch(world.rng, 2 * len(ranks))
        place = ranks.index(world.rank)
        alone = mlp()
        for _ in range(2):
            ddp.zero_grad(), alone.zero_grad()
            step_of(ddp, share(x, place, len(ranks)), share(y, place, len(ranks)))
            step_of(alone, x, y)
        assert_close(gradients(ddp.module), gradients(alone))
        dist.destroy_process_group(group)

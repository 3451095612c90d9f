"""Averaging models now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn, optim

from .conftest import World
from .learning import assert_close, assert_same_bits_everywhere, batch, mlp, step_of, values


def averaged_at(world: World, averager: Any, steps: int) -> list[int]:
    """Return the steps in which all ranks were averaged."""
    found = []
    mine, mean = 2.0**world.rank, (2.0**world.size - 1) / world.size  # no rank has the mean by itself
    for step in range(steps):
        one, two = nn.Parameter(np.full(3, mine, np.float32)), nn.Parameter(np.full((2, 2), 10 * mine))
        averager.average_parameters([{"params": [one]}, {"params": [two]}] if step % 2 else [one, two])
        if one.data[0] != mine:
            np.testing.assert_allclose(one.data, mean, rtol=1e-6)
            np.testing.assert_allclose(two.data, 10 * mean, rtol=1e-12)
            found.append(step)
    return found


def test_every_period_after_the_warm_up(world: World) -> None:
    expected = [3, 7, 11] if world.size > 1 else []
    assert averaged_at(world, dist.PeriodicModelAverager(4, warmup_steps=3), 13) == expected


def test_small_groups_often_and_large_ones_rarely(world: World) -> None:
    if world.size not in (2, 4):
        return
    averager = dist.HierarchicalModelAverager({1: 1, 2: 2} if world.size == 2 else {2: 2, 4: 4}, warmup_steps=1)
    seen = []
    for _ in range(9):
        parameter = nn.Parameter(np.full(3, float(world.rank)))
        averager.average_parameters([parameter])
        seen.append(float(parameter.data[0]))
    alone, pair, everybody = float(world.rank), world.rank // 2 * 2 + 0.5, (world.size - 1) / 2
    if world.size == 2:
        assert seen == [alone, alone, everybody, alone, everybody, alone, everybody, alone, everybody]
    else:
        assert seen == [alone, alone, pair, alone, everybody, alone, pair, alone, everybody]
    for group in averager.period_process_group_dict.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_impossible_options_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="period"):
        dist.PeriodicModelAverager(0)
    with pytest.raises(ValueError, match="warmup_steps"):
        dist.PeriodicModelAverager(2, warmup_steps=-1)
    with pytest.warns(UserWarning, match="period is 1"):
        dist.PeriodicModelAverager(1)
    for wrong in ({}, {0: world.size}, {2: world.size + 1}, {4: 1, 2: world.size}):
        with pytest.raises(ValueError, match="period"):
            dist.HierarchicalModelAverager(wrong)


def test_post_local_sgd_is_sgd_until_it_begins_and_agrees_at_every_averaging(world: World) -> None:
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    state = dist.PostLocalSGDState(None, groups[world.rank], 3)
    ddp, plain = dist.DistributedDataParallel(mlp()), dist.DistributedDataParallel(mlp())
    ddp.register_comm_hook(state, dist.post_localSGD_hook)
    local = dist.PostLocalSGDOptimizer(
        optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), dist.PeriodicModelAverager(2, warmup_steps=3)
    )
    whole = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rng = np.random.default_rng(world.rank)
    for step in range(8):
        x, y = batch(rng, 4)
        for model, optimizer in ((ddp, local), (plain, whole)):
            optimizer.zero_grad()
            step_of(model, x, y)
            optimizer.step()
        if step < 3:
            assert_close(values(ddp), values(plain))
        if step >= 3 and (step - 3) % 2 == 0:
            assert_same_bits_everywhere(values(ddp))
    assert local.averager.step == 8
    saved = local.state_dict()
    other = dist.PostLocalSGDOptimizer(optim.SGD(mlp().parameters()), dist.PeriodicModelAverager(2))
    other.load_state_dict(saved)
    assert other.averager.step == 8 and other.param_groups[0]["lr"] == 0.1
    del saved["step"]
    with pytest.warns(UserWarning, match="step counter"):
        other.load_state_dict(saved)
    assert other.averager.step == 0
    dist.destroy_process_group(groups[world.rank])

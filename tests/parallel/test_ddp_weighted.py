"""Reducing backwards and their weights: ``no_sync`` and ``weighted``."""

import warnings
from typing import Any

import numpy as np
import pytest
from harness.learning import (
    assert_close,
    assert_equal,
    assert_same_bits_everywhere,
    batch,
    gradients,
    mine,
    mlp,
    scale,
    step_of,
    twin,
)
from harness.world import World

import mpiddp as dist
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


def test_the_forward_decides_not_the_backward(world: World) -> None:
    ddp = DDP(mlp())
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError  # it ends all the same
    x, y = mine(world, *batch(world.rng, 2 * world.size))
    loss = F.cross_entropy(ddp(x), y)
    with ddp.no_sync():
        loss.backward()
    assert_same_bits_everywhere(gradients(ddp))
    ddp.zero_grad()
    with ddp.no_sync():
        loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    alone = mlp()
    step_of(alone, x, y)
    assert_equal(gradients(ddp.module), gradients(alone))


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, False),
        ({"find_unused_parameters": True}, True),
        ({"bucket_cap_mb": 0.0001}, True),
        ("hook", False),
        ("hook", True),
        ("empty batch", True),
    ],
    ids=str,
)
def test_weighted_is_the_joined_batch_also_where_a_rank_has_no_samples(world: World, options: Any, known: bool) -> None:
    alone = mlp()
    ddp = DDP(twin(alone), **(options if isinstance(options, dict) else {}))
    if options == "hook":
        ddp.register_comm_hook(None, dist.allreduce_hook)
    for step in range(3):
        counts = [(rank + step) % world.size * 2 for rank in range(world.size)] if world.size > 1 else [3]
        total = sum(counts)
        x, y = batch(world.rng, total)
        start, n = sum(counts[: world.rank]), counts[world.rank]
        alone.zero_grad(), ddp.zero_grad()
        step_of(alone, x, y)
        with ddp.weighted(n, total if known else None):
            if n or options == "empty batch":
                with np.errstate(invalid="ignore"), warnings.catch_warnings(action="ignore"):
                    step_of(ddp, x[start : start + n], y[start : start + n])
        assert_close(gradients(alone), gradients(ddp.module))
        assert_same_bits_everywhere(gradients(ddp))


def test_gradients_without_a_sample_count_nothing_even_if_they_are_no_numbers(world: World) -> None:
    ddp = DDP(scale())
    without = world.size > 1 and world.rank == world.size - 1
    with ddp.weighted(0 if without else 2):
        ddp(np.float32(np.nan if without else 3)).backward()
    np.testing.assert_allclose(ddp.module.w.grad, 3, rtol=1e-6)


def test_weighted_inside_of_weighted_leaves_the_outer_share(world: World) -> None:
    alone = mlp()
    ddp = DDP(twin(alone))
    x, y = batch(world.rng, sum(range(1, world.size + 1)))
    n = world.rank + 1
    part = slice(sum(range(1, n)), sum(range(1, n)) + n)
    with ddp.weighted(n):
        with ddp.weighted(1), ddp.no_sync():
            ddp(x)
        step_of(ddp, x[part], y[part])
    step_of(alone, x, y)
    assert_close(gradients(alone), gradients(ddp.module))


def test_weighted_accumulates_over_microbatches(world: World) -> None:
    alone = mlp()
    ddp = DDP(twin(alone))
    n = world.rank + 1
    total = world.size * (world.size + 1) // 2
    x, y = batch(world.rng, 2 * total)
    step_of(alone, x, y)
    start = world.rank * (world.rank + 1)
    one, two = slice(start, start + n), slice(start + n, start + 2 * n)
    with ddp.no_sync():
        step_of(ddp, x[one], y[one])
    with ddp.weighted(n, total):
        step_of(ddp, x[two], y[two])
    for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(p.grad / 2, q.grad, rtol=1e-5, atol=1e-6)

from __future__ import annotations

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mlp, share, step_of, twin
from harness.world import World

import mpiddp as dist
from mpiddp.parallel.naive import rank_weight

pytestmark = pytest.mark.mpi


def test_the_average_is_the_gradient_of_the_joined_batch(world: World) -> None:
    model, alone = mlp(), mlp()
    x, y = batch(world.rng, 4 * world.size)
    step_of(model, share(x, world.rank, world.size), share(y, world.rank, world.size))
    dist.average_gradients(model)
    step_of(alone, x, y)
    assert_close(gradients(model), gradients(alone))
    assert_same_bits_everywhere(gradients(model))


def test_uneven_batches_count_by_their_samples(world: World) -> None:
    model, alone = mlp(), mlp()
    counts = [3 * rank for rank in range(world.size)] if world.size > 1 else [3]  # rank 0 has none
    x, y = batch(world.rng, sum(counts))
    start = sum(counts[: world.rank])
    mine = slice(start, start + counts[world.rank])
    if counts[world.rank]:
        step_of(model, x[mine], y[mine])
    dist.average_gradients(model, weight=counts[world.rank])
    step_of(alone, x, y)
    assert_close(gradients(model), gradients(alone))


def test_a_mean_over_no_samples_does_not_reach_the_others(world: World) -> None:
    model = mlp()
    with np.errstate(all="ignore"):
        for parameter in model.parameters():
            parameter.grad = np.full_like(parameter.data, np.nan if world.rank == 0 else 1)
    dist.average_gradients(model, weight=world.rank or (world.size == 1))
    if world.size > 1:
        for parameter in model.parameters():
            np.testing.assert_allclose(parameter.grad, 1)


def test_a_parameter_without_gradient_counts_as_zeros_and_a_frozen_one_is_left_alone(world: World) -> None:
    model = mlp()
    frozen, silent = model[0].bias, model[2].bias
    frozen.requires_grad_(False)
    step_of(model, *batch(world.rng, 4))
    silent.grad = silent.grad if world.rank == 0 else None
    before = None if silent.grad is None else silent.grad.copy()
    dist.average_gradients(model)
    assert frozen.grad is None
    if before is not None:
        np.testing.assert_allclose(silent.grad, before / world.size, rtol=1e-6)


def test_only_the_group_takes_part(world: World) -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = np.full_like(parameter.data, world.rank)
    group = dist.new_group([0])
    if world.rank == 0:
        dist.average_gradients(twin(model), group=group)
    dist.average_gradients(model)
    np.testing.assert_allclose(model[0].bias.grad, (world.size - 1) / 2, rtol=1e-6)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("n", "total"), [(-1, 4), (5, 4), (0, 0)])
def test_impossible_numbers_of_samples_are_refused(n: int, total: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        rank_weight(n, total)

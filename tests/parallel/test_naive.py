import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mlp, step_of, twin
from harness.world import World

import mpiddp as dist

pytestmark = pytest.mark.mpi


def test_uneven_batches_count_by_their_samples(world: World) -> None:
    model, alone = mlp(), mlp()
    counts = [3 * rank for rank in range(world.size)] if world.size > 1 else [3]
    x, y = batch(world.rng, sum(counts))
    start = sum(counts[: world.rank])
    mine = slice(start, start + counts[world.rank])
    if counts[world.rank]:
        step_of(model, x[mine], y[mine])
    else:  # the mean over no samples
        for parameter in model.parameters():
            parameter.grad = np.full_like(parameter.data, np.nan)
    dist.average_gradients(model, weight=counts[world.rank])
    step_of(alone, x, y)
    assert_close(gradients(model), gradients(alone))
    assert_same_bits_everywhere(gradients(model))


def test_only_the_group_takes_part_and_what_is_missing_counts_as_zeros(world: World) -> None:
    model = mlp()
    frozen, silent = model[0].bias, model[2].bias
    for parameter in model.parameters():
        parameter.grad = np.full_like(parameter.data, world.rank + 1)
    frozen.grad = None
    frozen.requires_grad_(False)
    silent.grad = silent.grad if world.rank == 0 else None
    group = dist.new_group([0])
    if world.rank == 0:
        dist.average_gradients(twin(model), group=group)
        dist.destroy_process_group(group)
    dist.average_gradients(model)
    assert frozen.grad is None
    np.testing.assert_allclose(model[0].weight.grad, (world.size + 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(silent.grad, 1 / world.size, rtol=1e-6)

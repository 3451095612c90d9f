import copy
from typing import Any

import numpy as np
import pytest
from harness.learning import assert_same_bits_everywhere
from harness.world import World

import mpiddp as dist
from mpiddp import nn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

SHAPES = [(3, 4), (5,), (2, 3), ()]
START = np.sin(np.arange(24) + 1.0)
FRAGMENTS = {1: [slice(0, 24)], 2: [slice(0, 12), slice(12, 24)]}
"""Elements of each fragment: of all parameters, or of the first one and of the three others."""

DUE = {1: {4: [0], 8: [0], 12: [0]}, 2: {2: [0], 4: [1], 6: [0], 8: [1], 10: [0], 12: [1]}}
"""By the number of fragments, and of steps with a period of 4: the fragments that are synchronised."""


def gradient_of(x: Any, rank: int, step: int) -> Any:
    """Return a gradient that depends on everything: of a loss with other minima on each rank."""
    return np.asarray(x * (1 + rank / 4) - np.cos(5 * x + step * (rank + 1)))


def diloco_in_one_process(ranks: int, steps: int, fragments: int, lr: float, momentum: float, warmup: int) -> Any:
    """Return the parameters of each rank after each step: Algorithm 1 of arXiv 2311.08105 in float64."""
    world, outer_momentum = START.copy(), np.zeros_like(START)
    workers, inner_momentum = np.tile(START, (ranks, 1)), np.zeros((ranks, START.size))
    history = []
    for step in range(1, steps + 1):
        gradients = np.stack([gradient_of(x, rank, step) for rank, x in enumerate(workers)])
        inner_momentum = 0.5 * inner_momentum + (gradients.mean(axis=0) if step <= warmup else gradients)
        workers = workers - 0.1 * inner_momentum
        if step == warmup:
            world = workers[0].copy()
        for part in (FRAGMENTS[fragments][each] for each in DUE[fragments].get(step - warmup, [])):
            outer_gradient = (world[part] - workers[:, part]).mean(axis=0)
            outer_momentum[part] = momentum * outer_momentum[part] + outer_gradient
            world[part] -= lr * (outer_gradient + momentum * outer_momentum[part])
            workers[:, part] = world[part]
        history.append(workers.copy())
    return history


def joined(parameters: Any) -> np.ndarray:
    return np.concatenate([parameter.data.reshape(-1) for parameter in parameters])


def local_training(world: World, fragments: int = 1, **options: Any) -> Any:
    cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
    parts = zip(np.split(START, cuts), SHAPES, strict=True)
    parameters = [nn.Parameter(part.reshape(shape) + world.rank) for part, shape in parts]  # the first rank's count
    inner = optim.SGD(parameters, lr=0.1, momentum=0.5)
    return parameters, inner, dist.DiLoCo(parameters, 4, fragments, **options)


def local_step(world: World, training: Any, step: int, warmup: int = 0) -> None:
    parameters, optimizer, averager = training
    for parameter in parameters:
        parameter.grad = gradient_of(parameter.data, world.rank, step)
        if step <= warmup:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
    averager.average_parameters(parameters)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("lr", "momentum", "warmup"), [(0.7, 0.9, 0), (0.3, 0.5, 3), (1.0, 0.0, 0)])
def test_diloco_is_the_papers(world: World, fragments: int, lr: float, momentum: float, warmup: int) -> None:
    expected = diloco_in_one_process(world.size, warmup + 12, fragments, lr, momentum, warmup)
    training = parameters, *_ = local_training(world, fragments, lr=lr, momentum=momentum, warmup_steps=warmup)
    for step in range(1, warmup + 13):
        local_step(world, training, step, warmup)
        found = joined(parameters)
        np.testing.assert_allclose(found, expected[step - 1][world.rank], rtol=1e-12, atol=1e-12, err_msg=str(step))
        for each in DUE[fragments].get(step - warmup, []):
            assert_same_bits_everywhere({"part": found[FRAGMENTS[fragments][each]]})


def test_diloco_resumes_to_the_same_bits(world: World) -> None:
    training = parameters, *stateful = local_training(world, 2)
    for step in range(1, 6):
        local_step(world, training, step)
    saved = copy.deepcopy([[each.state_dict() for each in stateful], [parameter.data for parameter in parameters]])
    resumed = others, *empty = local_training(world, 2)
    for each, state in zip(empty, saved[0], strict=True):
        each.load_state_dict(state)
    for parameter, x in zip(others, saved[1], strict=True):
        parameter.data[...] = x
    for step in range(6, 13):
        local_step(world, training, step)
        local_step(world, resumed, step)
    np.testing.assert_array_equal(joined(parameters), joined(others))


def test_diloco_synchronizes_at_once_and_not_twice_in_a_step(world: World) -> None:
    training = parameters, _, averager = local_training(world, 2)
    for step in range(1, 4):
        local_step(world, training, step)
    for _ in range(2):
        averager.synchronize()
        assert_same_bits_everywhere({"all": joined(parameters)})
    local_step(world, training, 4)  # of the second fragment, as planned
    before = joined(parameters)
    averager.synchronize()
    assert [np.array_equal(joined(parameters)[part], before[part]) for part in FRAGMENTS[2]] == [False, True]


def test_diloco_keeps_dtypes_apart(world: World) -> None:
    parameters = [nn.Parameter(np.full(3, 2.0, dtype)) for dtype in (np.float32, np.float64, np.float32)]
    averager = dist.DiLoCo(parameters, 1, lr=1, momentum=0)
    for parameter in parameters:
        parameter.data += world.rank
    averager.average_parameters(parameters)
    for parameter in parameters:
        np.testing.assert_allclose(parameter.data, 2 + (world.size - 1) / 2, rtol=1e-6)
    assert [parameter.data.dtype.name for parameter in parameters] == ["float32", "float64", "float32"]


def test_impossible_diloco_is_refused(world: World) -> None:
    parameters = [nn.Parameter(np.zeros(2)), nn.Parameter(np.zeros(2))]
    for period, fragments in ((0, 1), (4, 0), (4, 3), (1, 2)):
        with pytest.raises(ValueError, match=r"period|fragments"):
            dist.DiLoCo(parameters, period, fragments)
    whole = dist.DiLoCo(parameters, 4)
    with pytest.raises(ValueError, match="made with"):
        whole.average_parameters(parameters[::-1])
    dist.DiLoCo(parameters, 4, 2).load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and the optimizer has \[1\]"):
        dist.DiLoCo(parameters[:1], 4).load_state_dict(whole.state_dict())
    for period in (np.nan, np.inf, 2.5, "4"):
        with pytest.raises(TypeError, match=f"period has to be an integer, got {period!r}"):
            dist.DiLoCo(parameters, period)  # type: ignore[arg-type]

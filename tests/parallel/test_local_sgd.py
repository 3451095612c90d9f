from __future__ import annotations

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
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]]}
"""Parameters of each fragment: 12, then 5 + 6 + 1 elements."""

DUE = {1: {4: [0], 8: [0], 12: [0]}, 2: {2: [0], 4: [1], 6: [0], 8: [1], 10: [0], 12: [1]}}
"""By the number of fragments, and of steps with a period of 4: the fragments that are synchronised."""


def gradient_of(x: Any, rank: int, step: int) -> Any:
    """Return a gradient that depends on everything: of a quadratic with another minimum on each rank."""
    return np.asarray(x * (1 + rank / 4) - np.cos(np.arange(x.size).reshape(x.shape) + step * (rank + 1)))


def diloco_in_one_process(ranks: int, steps: int, fragments: int, lr: float, momentum: float, warmup: int) -> Any:
    """Return the parameters of each rank after each step: Algorithm 1 of arXiv 2311.08105 in float64."""
    start = [np.sin(np.arange(int(np.prod(shape))) + 1.0).reshape(shape) for shape in SHAPES]
    world = [x.copy() for x in start]
    outer_momentum = [np.zeros_like(x) for x in start]
    workers = [[x.copy() for x in start] for _ in range(ranks)]
    inner_momentum = [[np.zeros_like(x) for x in start] for _ in range(ranks)]
    history = []
    for step in range(1, steps + 1):
        gradients = [[gradient_of(x, rank, step) for x in workers[rank]] for rank in range(ranks)]
        for rank in range(ranks):
            for i in range(len(SHAPES)):
                mine = sum(each[i] for each in gradients) / ranks if step <= warmup else gradients[rank][i]
                inner_momentum[rank][i] = 0.5 * inner_momentum[rank][i] + mine
                workers[rank][i] = workers[rank][i] - 0.1 * inner_momentum[rank][i]
        if step == warmup:
            world = [x.copy() for x in workers[0]]
        for fragment in DUE[fragments].get(step - warmup, []):
            for i in FRAGMENTS[fragments][fragment]:
                outer_gradient = sum(world[i] - each[i] for each in workers) / ranks
                outer_momentum[i] = momentum * outer_momentum[i] + outer_gradient
                world[i] = world[i] - lr * (outer_gradient + momentum * outer_momentum[i])
                for each in workers:
                    each[i] = world[i].copy()
        history.append([[x.copy() for x in each] for each in workers])
    return history


def local_training(world: World, fragments: int = 1, **options: Any) -> Any:
    parameters = [nn.Parameter(np.sin(np.arange(int(np.prod(s))) + 1.0).reshape(s)) for s in SHAPES]
    for parameter in parameters:
        parameter.data[...] += world.rank  # the first rank's values count
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
        for parameter, x in zip(parameters, expected[step - 1][world.rank], strict=True):
            np.testing.assert_allclose(parameter.data, x, rtol=1e-12, atol=1e-12, err_msg=str(step))
        due = [i for each in DUE[fragments].get(step - warmup, []) for i in FRAGMENTS[fragments][each]]
        assert_same_bits_everywhere({str(i): parameters[i].data for i in due})


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
    for one, two in zip(parameters, others, strict=True):
        np.testing.assert_array_equal(one.data, two.data)


def test_diloco_synchronizes_at_once_and_not_twice_in_a_step(world: World) -> None:
    training = parameters, _, averager = local_training(world, 2)
    for step in range(1, 4):
        local_step(world, training, step)
    for _ in range(2):
        averager.synchronize()
        now = {str(i): parameter.data.copy() for i, parameter in enumerate(parameters)}
        assert_same_bits_everywhere(now)
    local_step(world, training, 4)  # of the second fragment, as planned
    before = [parameter.data.copy() for parameter in parameters]
    averager.synchronize()
    for i, parameter in enumerate(parameters):
        assert np.array_equal(parameter.data, before[i]) == (i in FRAGMENTS[2][1])


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

"""PowerSGD: gradients of low rank come through, what it leaves out, and what it is given."""

from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, gradients
from harness.world import World

import mpiddp as dist
from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812

from .test_hooks import DDP, reduced

pytestmark = pytest.mark.mpi


def low_rank(world: World, hook: Any, state: Any, steps: int, n: int = 24, m: int = 20, rank: int = 2) -> Any:
    """Return the gradient of the last step of a layer whose true one has a rank, and that gradient."""
    model = nn.Linear(m, n)
    ddp = DDP(model)
    ddp.register_comm_hook(state, hook)
    rng = np.random.default_rng(5)
    left, right = rng.standard_normal((n, rank)), rng.standard_normal((rank, m))
    noise = rng.standard_normal((world.size, n, rank))  # ranks differ, and share the space of rows
    local = ((left + noise[world.rank]) @ right).astype(np.float32)
    for _ in range(steps):
        ddp.zero_grad()
        (ddp(np.eye(m, dtype=np.float32)) * local.T).sum().backward()
        assert_same_bits_everywhere(gradients(ddp))
    return model.weight.grad, (left + noise.mean(axis=0)) @ right


def test_a_gradient_of_low_rank_comes_through_exactly(world: World) -> None:
    state = dist.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    found, expected = low_rank(world, dist.powerSGD_hook, state, steps=4)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_vectors_and_early_steps_are_not_compressed(world: World) -> None:
    exact = reduced(world, None, steps=2)
    state = dist.PowerSGDState(None, start_powerSGD_iter=2)
    assert_close(reduced(world, dist.powerSGD_hook, state, steps=2), exact, atol=1e-7)
    exact = reduced(world, None, steps=3)
    state = dist.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=100)  # not worth it
    assert_close(reduced(world, dist.powerSGD_hook, state, steps=3), exact, atol=1e-6)
    state = dist.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    found = reduced(world, dist.powerSGD_hook, state, steps=3)
    for name in exact:
        if name.endswith("bias"):
            np.testing.assert_allclose(found[name], exact[name], rtol=1e-5, atol=1e-6)
    assert any(np.abs(found[name] - exact[name]).max() > 1e-4 for name in exact if name.endswith("weight"))


def test_error_feedback_sends_all_in_the_end(world: World) -> None:
    def mean_over_steps(feedback: bool) -> np.ndarray:
        state = dist.PowerSGDState(
            None, 1, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=feedback, warm_start=False
        )
        model = nn.Linear(10, 12, bias=False)
        ddp = DDP(model)
        ddp.register_comm_hook(state, dist.powerSGD_hook)
        full = np.random.default_rng(3).standard_normal((10, 12)).astype(np.float32) * (world.rank + 1)
        total = np.zeros((12, 10))
        for step in range(100):
            ddp.zero_grad()
            (ddp(np.eye(10, dtype=np.float32)) * full).sum().backward()
            if step >= 2:
                total += model.weight.grad
        return total / 98

    truth = np.random.default_rng(3).standard_normal((10, 12)).T * (world.size + 1) / 2
    off = [np.abs(mean_over_steps(feedback) - truth).max() for feedback in (True, False)]
    assert off[0] < 0.2 * off[1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"matrix_approximation_rank": "abc"}, TypeError),
        ({"matrix_approximation_rank": 1.5}, TypeError),
        ({"matrix_approximation_rank": 0}, ValueError),
        ({"start_powerSGD_iter": 1}, ValueError),  # before buckets are settled
    ],
)
def test_impossible_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        dist.PowerSGDState(None, **options)


def test_gradients_of_zero_are_no_obstacle(world: World) -> None:
    state = dist.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    model = nn.Linear(12, 12)
    ddp = DDP(model)
    ddp.register_comm_hook(state, dist.powerSGD_hook)
    for _ in range(4):
        ddp.zero_grad()
        F.mse_loss(ddp(np.zeros((2, 12), np.float32)) * 0, np.zeros((2, 12), np.float32)).backward()
    np.testing.assert_allclose(model.weight.grad, 0, atol=1e-6)

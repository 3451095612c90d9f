"""Refusals of DistributedDataParallel, and a step after an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mine, mlp, step_of
from harness.world import World

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Function
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


class Failing(Function):
    """The identity, whose backward fails on request."""

    fail = False

    def forward(self, x: Any) -> Any:
        return x

    def backward(self, grad: Any) -> Any:
        if Failing.fail:
            raise ZeroDivisionError("in backward")
        return grad


class Breakable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.last(Failing.apply(self.first(x)))


@pytest.fixture
def failing() -> Iterator[type[Failing]]:
    yield Failing
    Failing.fail = False


@pytest.mark.parametrize(
    ("who", "cap", "warm"), [("all", 1e-5, True), ("first", None, False), ("first", 1e-5, True), ("last", 1e-5, False)]
)
def test_a_step_after_an_error_in_backward_is_good(
    world: World, failing: type[Failing], who: str, cap: float | None, warm: bool
) -> None:
    ddp, alone = DDP(Breakable(), bucket_cap_mb=cap), Breakable()
    if warm:
        step_of(ddp, *batch(world.rng, 3))
        ddp.zero_grad()
    x, y = batch(world.rng, 2 * world.size)
    part = mine(world, x, y)
    failing.fail = fails = who == "all" or world.rank == (0 if who == "first" else world.size - 1)
    loss = F.cross_entropy(ddp(part[0]), part[1])
    if fails:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        failing.fail = False
        del loss
    else:
        loss.backward()  # ends when the others have begun their next step, with gradients that nobody can use
        assert np.isnan(ddp.module.first.weight.grad).all()
    ddp.zero_grad()
    step_of(ddp, *part)
    step_of(alone, x, y)
    assert_close(gradients(ddp.module), gradients(alone))
    assert_same_bits_everywhere(gradients(ddp))


def test_a_model_that_is_converted_after_wrapping_is_refused(world: World) -> None:
    ddp = DDP(mlp())
    ddp.module.convert(lambda array: array.astype(np.float64))
    inputs, labels = batch(world.rng, 2)
    with pytest.raises(RuntimeError, match=r"was float32 when .* is float64 now"):
        step_of(ddp, inputs.astype(np.float64), labels)
    ddp.module.convert(lambda array: array.astype(np.float32)).zero_grad()
    for _ in range(2):
        ddp.zero_grad()
        step_of(ddp, *mine(world, *batch(world.rng, 2 * world.size)))
        assert_same_bits_everywhere(gradients(ddp))
        assert all(np.isfinite(p.grad).all() for p in ddp.parameters())


def test_wrong_arguments_are_refused(world: World) -> None:
    with pytest.raises(TypeError, match=r"mpiddp\.nn\.Module"):
        DDP(lambda x: x)  # type: ignore[arg-type]
    like_torchs = type("Linear", (), {"__module__": "torch.nn", "named_parameters": lambda self: []})()
    with pytest.raises(TypeError, match=r"got torch\.nn\.Linear; mpiddp\.torch\.DistributedDataParallel takes torch's"):
        DDP(like_torchs)
    with pytest.raises(ValueError, match="not both"):
        DDP(mlp(), bucket_cap_mb=1, bucket_cap_mb_list=[1])
    with pytest.raises(ValueError, match="positive"):
        DDP(mlp(), bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="positive"):
        DDP(mlp(), bucket_cap_mb=0)
    with pytest.raises(ValueError, match="device_ids"):
        DDP(mlp(), device_ids=[0, 1])
    with pytest.raises(ValueError, match="fp16_compress_hook or bf16_compress_hook"):
        DDP(mlp(), mixed_precision=object())

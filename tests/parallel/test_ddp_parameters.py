"""Parameters that DistributedDataParallel averages: frozen, unused and ignored ones."""

from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mine, mlp, step_of, twin
from harness.world import World, everybody

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


def test_frozen_parameters_get_no_gradient_but_are_synchronised(world: World) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[0].weight.data[...] = world.rank + 1
    ddp = DDP(model)
    np.testing.assert_array_equal(model[0].weight.data, 1)
    step_of(ddp, *batch(world.rng, 4))
    assert model[0].weight.grad is None and model[0].weight.grad_slot is None
    assert model[2].weight.grad is not None


def test_a_model_without_trained_parameters_is_refused() -> None:
    model = mlp()
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DDP(model)


class Branches(nn.Module):
    """Three layers, of which forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(5)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any, use: str) -> Any:
        for name in use:
            x = getattr(self, name)(x)
        return x


def test_unused_parameters_are_an_error_that_names_them(world: World) -> None:
    ddp = DDP(Branches())
    x = np.ones((2, 4), np.float32)
    with pytest.raises(RuntimeError, match=r"Expected to have finished reduction.*find_unused.*b\.weight, b\.bias"):
        ddp(x, "ac").sum().backward()
    ddp.zero_grad()
    ddp(x, "abc").sum().backward()
    assert_same_bits_everywhere(gradients(ddp))


def test_what_is_unused_everywhere_keeps_no_gradient_and_what_is_unused_here_gets_the_average(world: World) -> None:
    ddp = DDP(Branches(), find_unused_parameters=True)
    x = np.ones((2, 4), np.float32)
    for _ in range(3):
        ddp.zero_grad()
        use = "ab" if world.rank == 0 else "a"  # nobody uses c, only rank 0 uses b
        ddp(x, use).sum().backward()
        alone = Branches()
        alone(x, "ab").sum().backward()
        assert ddp.module.c.weight.grad is None and ddp.module.c.bias.grad is None
        np.testing.assert_allclose(ddp.module.b.weight.grad, alone.b.weight.grad / world.size, rtol=1e-5)
        assert_same_bits_everywhere(gradients(ddp))


def test_a_rank_that_uses_nothing_still_takes_part(world: World) -> None:
    ddp = DDP(Branches(), find_unused_parameters=True)
    x = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
    ddp(x * 1, "a" if world.rank == 0 else "").sum().backward()
    np.testing.assert_allclose(ddp.module.a.bias.grad, 2 / world.size, rtol=1e-6)


def test_frozen_after_wrapping_is_an_error_that_says_so(world: World) -> None:
    ddp = DDP(mlp())
    ddp.module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"frozen or replaced after wrapping.*: 0\.weight$"):
        step_of(ddp, *batch(world.rng, 3))


def test_buckets_that_nobody_uses_stay_here(world: World) -> None:
    ddp = DDP(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-5)
    plain = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    sent: list[int] = []

    def counting(_: Any, bucket: Any) -> Any:
        sent.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)

    ddp.register_comm_hook(None, counting)
    x = np.full((2, 4), world.rank + 1, np.float32)
    for use, buckets in (("ac", 4), ("a", 2), ("abc", 6)):
        sent.clear()
        for model in (ddp, plain):
            model.zero_grad()
            model(x, use).sum().backward()
        assert len(sent) == buckets
        assert [name for name, p in ddp.module.named_parameters() if p.grad is None] == [
            f"{name}.{kind}" for name in "abc" if name not in use for kind in ("weight", "bias")
        ]
        used = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (ddp, plain)]
        assert_close(*used)


def test_a_rank_without_samples_runs_an_empty_batch_where_unused_buckets_stay_here(world: World) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-5}
    ddp, plain = DDP(Branches(), skip_all_reduce_unused_params=True, **options), DDP(Branches(), **options)
    n = 0 if world.rank == world.size - 1 and world.size > 1 else 2
    x = np.full((n, 4), world.rank + 1, np.float32)
    for model in (ddp, plain):
        with model.weighted(n):
            model(x, "ac").sum().backward()
    assert_close(*({k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (ddp, plain)))
    assert ddp.module.b.weight.grad is None
    with pytest.raises(RuntimeError, match="a rank without samples does not know"), ddp.weighted(0, 1):
        ddp.skip_forward()


def test_static_graph_is_learned_in_a_backward_that_is_complete(world: World) -> None:
    ddp = DDP(Branches(), static_graph=True)
    x = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
    handle = x.register_post_accumulate_grad_hook(lambda leaf: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(x, "a").sum().backward()
    handle.remove()
    for _ in range(3):
        ddp.zero_grad()
        ddp(x, "ab" if world.rank == 0 else "a").sum().backward()
        assert ddp.module.c.weight.grad is None and ddp.module.b.weight.grad is not None
        assert_same_bits_everywhere(gradients(ddp))


def test_parameters_to_ignore(world: World) -> None:
    model = mlp()
    DDP.set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    model[0].weight.data[...] = world.rank
    ddp = DDP(model)
    np.testing.assert_array_equal(model[0].weight.data, world.rank)
    step_of(ddp, np.ones((2, 5), np.float32) * (world.rank + 1), np.array([0, 1]))
    if world.size > 1:
        assert len(set(everybody(model[0].weight.grad.tobytes()))) > 1


def test_a_wrapper_in_the_module_is_refused_unless_its_parameters_are_left_to_it(world: World) -> None:
    inner = DDP(mlp())
    model = nn.Sequential(nn.Linear(5, 5), inner)
    with pytest.raises(ValueError, match=r"averages 1\.module\.0\.weight already"):
        DDP(model)
    with pytest.raises(ValueError, match="already"):
        DDP(inner)
    DDP.set_params_and_buffers_to_ignore_for_model(model, [f"1.{name}" for name, _ in inner.named_parameters()])
    ddp, plain = DDP(model), nn.Sequential(twin(model[0]), twin(inner.module))
    x, y = mine(world, *batch(world.rng, 2 * world.size))
    step_of(ddp, x, y), step_of(plain, x, y)
    dist.average_gradients(plain)
    assert_close(gradients(plain), gradients(nn.Sequential(model[0], inner.module)))

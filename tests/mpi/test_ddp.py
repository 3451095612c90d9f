"""DistributedDataParallel: against the plain way, against one process, against torch's DDP on Gloo."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import tracemalloc
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Function, Tensor, no_grad
from mpiddp.nn import functional as F  # noqa: N812

from .conftest import World
from .learning import (
    assert_close,
    assert_equal,
    assert_same_bits_everywhere,
    batch,
    gloo,
    gradients,
    mlp,
    share,
    step_of,
    torch_mlp,
    twin,
    values,
)

DDP = dist.DistributedDataParallel


def mine(world: World, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(share(x, world.rank, world.size) for x in arrays)


# -- the same as the plain way, as one process, as torch -------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 0.0001, [0.0001, 25]], ids=["default", "tiny", "list"])
def test_gradients_are_those_of_the_plain_way(world: World, cap: Any) -> None:
    options = {"bucket_cap_mb_list": cap} if isinstance(cap, list) else {"bucket_cap_mb": cap}
    plain = mlp()
    ddp = DDP(twin(plain), **options)
    for _ in range(3):
        x, y = mine(world, *batch(world.rng, 4 * world.size))
        plain.zero_grad(), ddp.zero_grad()
        step_of(plain, x, y)
        dist.average_gradients(plain)
        step_of(ddp, x, y)
        if world.size <= 2 and not isinstance(cap, list):  # one addition has one order
            assert_equal(gradients(plain), gradients(ddp.module))
        assert_close(gradients(plain), gradients(ddp.module), rtol=1e-5, atol=1e-7)
        assert_same_bits_everywhere(gradients(ddp))


def test_a_bucket_for_each_parameter_has_the_bits_of_the_plain_way(world: World) -> None:
    """Then both reduce the same arrays by the same algorithm. Modules are nested, one is there at two depths."""
    nn.manual_seed(3)
    twice = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    deep = nn.Sequential(nn.Linear(5, 7), nn.Sequential(twice, nn.Sequential(nn.BatchNorm1d(7))))
    plain = nn.Sequential(deep, twice, nn.Sequential(nn.Sequential(nn.Linear(7, 3, bias=False))))
    ddp = DDP(twin(plain), bucket_cap_mb=1e-9)
    assert len(ddp.bucket_sizes_bytes()) == 7
    for _ in range(3):
        x, y = mine(world, *(world.rng.standard_normal((4 * world.size, n)).astype(np.float32) for n in (5, 3)))
        for model in (plain, ddp):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
        dist.average_gradients(plain)
        assert_equal(gradients(plain), gradients(ddp.module))
        assert_same_bits_everywhere(gradients(ddp))


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam], ids=["SGD", "Adam"])
def test_training_is_that_of_one_process_on_the_joined_batch(world: World, make: Any) -> None:
    alone = mlp()
    ddp = DDP(twin(alone))
    optimizers = [make(model.parameters(), lr=0.05) for model in (alone, ddp)]
    for _ in range(5):
        x, y = batch(world.rng, 4 * world.size)
        for model, data in ((alone, (x, y)), (ddp, mine(world, x, y))):
            model.zero_grad()
            step_of(model, *data)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(values(alone), values(ddp.module), rtol=1e-4, atol=1e-5)
    assert_same_bits_everywhere(values(ddp))


def test_training_is_that_of_torch(world: World) -> None:
    torch = gloo()
    model = mlp()
    theirs = torch.nn.parallel.DistributedDataParallel(torch_mlp(torch, model))
    ours = DDP(model)
    optimizer = optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        x, y = mine(world, *batch(world.rng, 3 * world.size))
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        step_of(ours, x, y)
        torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        their_optimizer.step()
    for mine_, torchs in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(mine_.data, torchs.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_accumulation_is_that_of_torch(world: World) -> None:
    torch = gloo()
    model = mlp()
    theirs = torch.nn.parallel.DistributedDataParallel(torch_mlp(torch, model))
    ours = DDP(model)
    parts = [mine(world, *batch(world.rng, 3 * world.size)) for _ in range(4)]

    def local(index: int) -> None:
        with ours.no_sync():
            step_of(ours, *parts[index])
        with theirs.no_sync():
            x, y = map(torch.from_numpy, parts[index])
            torch.nn.functional.cross_entropy(theirs(x), y).backward()

    def reduced(index: int) -> None:
        step_of(ours, *parts[index])
        x, y = map(torch.from_numpy, parts[index])
        torch.nn.functional.cross_entropy(theirs(x), y).backward()

    def compare() -> None:
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-5, atol=1e-6)

    local(0), local(1), compare()
    reduced(2), compare()
    reduced(3), compare()  # onto an average that stands
    ours.zero_grad(), theirs.zero_grad()
    reduced(0), compare()


# -- where gradients live --------------------------------------------------------------------------------------------


def test_gradients_are_views_of_their_buckets_and_neighbours(world: World) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.0002)
    for _ in range(3):
        ddp.zero_grad()
        step_of(ddp, *batch(world.rng, 4))
        buckets = ddp._reducer.buckets
        assert len(buckets) > 1
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                assert parameter.grad is gradient
                assert np.shares_memory(parameter.grad, bucket.buffer())
            assert sum(g.size for g in bucket.gradients()) == bucket.buffer().size
    total = sum(bucket.buffer().nbytes for bucket in buckets)
    assert total == sum(parameter.data.nbytes for parameter in ddp.parameters())


def test_a_step_is_one_stretch_of_memory(world: World) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.0002)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        step_of(ddp, *batch(world.rng, 4))
        optimizer.step()
    assert len(optimizer._layouts[0].stretches(list(ddp.parameters()))) == 1


def test_a_step_makes_no_second_copy_of_the_gradients(world: World) -> None:
    ddp = DDP(nn.Linear(1024, 1024), bucket_cap_mb=1)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    x = np.ones((2, 1024), np.float32)

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()

    for _ in range(2):
        step()
    tracemalloc.start()
    step()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 0.1 * 4 * 1024 * 1024


def test_a_gradient_that_the_program_replaces_still_arrives(world: World) -> None:
    ddp = DDP(mlp())
    x, y = batch(world.rng, 4)
    with ddp.no_sync():
        step_of(ddp, x, y)
    for parameter in ddp.parameters():
        parameter.grad = np.full_like(parameter.data, world.rank)
    before = mlp()
    step_of(before, x, y)
    step_of(ddp, x, y)
    for (name, parameter), local in zip(ddp.module.named_parameters(), before.parameters(), strict=True):
        expected = local.grad + (world.size - 1) / 2
        np.testing.assert_allclose(parameter.grad, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.shares_memory(parameter.grad, parameter.grad_slot)


@pytest.mark.parametrize("how", ["optimizer", "zeros", "module", "by hand"])
def test_every_way_to_clear_gradients(world: World, how: str) -> None:
    ddp = DDP(mlp())
    optimizer = optim.SGD(ddp.parameters(), lr=0.0)
    x, y = batch(world.rng, 4)
    clear: dict[str, Callable[[], Any]] = {
        "optimizer": optimizer.zero_grad,
        "zeros": lambda: optimizer.zero_grad(set_to_none=False),
        "module": ddp.zero_grad,
        "by hand": lambda: [setattr(p, "grad", np.zeros_like(p.data)) for p in ddp.parameters()],
    }
    step_of(ddp, x, y)
    first = gradients(ddp)
    for _ in range(2):
        clear[how]()
        step_of(ddp, x, y)
        assert_close(gradients(ddp), first, rtol=1e-6)


def test_large_and_tiny_parameters_and_empty_ones(world: World) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Parameter(np.ones((300, 200), np.float32))
            for index in range(300):
                self.register_parameter(f"p{index}", nn.Parameter(np.ones(index % 3, np.float32)))

        def forward(self, x: Any) -> Tensor:
            total = (self.big * x).sum()
            for index in range(300):
                total = total + (getattr(self, f"p{index}") * (index + x)).sum()
            return total

    ddp = DDP(Many(), bucket_cap_mb=0.001)
    for _ in range(2):
        ddp.zero_grad()
        ddp(float(world.rank)).backward()
        mean = (world.size - 1) / 2
        np.testing.assert_allclose(ddp.module.big.grad, mean, rtol=1e-6)
        for index in range(300):
            np.testing.assert_allclose(getattr(ddp.module, f"p{index}").grad, index + mean, rtol=1e-6)


@pytest.mark.parametrize("second", ["float64", "float16", "complex64"])
def test_dtypes_have_buckets_of_their_own(world: World, second: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(6):
                dtype = second if index % 2 else "float32"
                self.register_parameter(f"p{index}", nn.Parameter(np.ones(5, dtype)))

        def forward(self, x: float) -> list[Tensor]:
            return [getattr(self, f"p{index}") * x for index in range(6)]

    ddp = DDP(Mixed(), bucket_cap_mb=0.00003)
    for _ in range(2):
        ddp.zero_grad()
        outputs = ddp(float(world.rank + 1))
        total: Any = None
        for output in outputs:
            part = output.to("float64").sum() if output.dtype.kind == "f" else (output * output).abs().sum()
            total = part if total is None else total + part
        total.backward()
        assert {bucket.buffer().dtype.name for bucket in ddp._reducer.buckets} == {"float32", second}
        assert_same_bits_everywhere(gradients(ddp))
    if second != "complex64":
        for parameter in ddp.parameters():
            np.testing.assert_allclose(parameter.grad, (world.size + 1) / 2, rtol=2e-3)


def test_buckets_follow_the_order_of_gradients_once(world: World) -> None:
    class Crossed(nn.Module):
        """Registered in the order a, b, c; used in the order c, a, b."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Any) -> Tensor:
            return self.b(self.a(self.c(x).tanh()).tanh())

    nn.manual_seed(0)
    model = Crossed()
    plain = twin(model)
    ddp = DDP(model, bucket_cap_mb=0.001)
    names = {id(p): name[0] for name, p in model.named_parameters()}

    def order() -> str:
        return "".join(names[id(b.parameters()[-1])] for b in ddp._reducer.buckets)

    assert order() == "cba"
    x = world.rng.standard_normal((4, 16)).astype(np.float32)
    buffers = []
    for _ in range(3):
        ddp.zero_grad(), plain.zero_grad()
        F.mse_loss(ddp(x), 0 * x).backward()
        F.mse_loss(plain(x), 0 * x).backward()
        assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7)
        assert order() == "bac"
        buffers.append([id(bucket.buffer()) for bucket in ddp._reducer.buckets])
    assert buffers[0] == buffers[1] == buffers[2]
    assert_equal(values(model), values(plain))


# -- which parameters ------------------------------------------------------------------------------------------------


def test_a_shared_parameter_is_reduced_once(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.two = nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Any) -> Tensor:
            return self.two(self.one(x).tanh())

    nn.manual_seed(0)
    alone = Tied()
    ddp = DDP(twin(alone))
    assert ddp.module.one.weight is ddp.module.two.weight
    x = world.rng.standard_normal((2 * world.size, 4)).astype(np.float32)
    F.mse_loss(alone(x), 0 * x).backward()
    (part,) = mine(world, x)
    F.mse_loss(ddp(part), 0 * part).backward()
    assert_close(gradients(alone), gradients(ddp.module))


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


def test_unused_parameters_are_those_of_torch(world: World) -> None:
    torch = gloo()

    class Net(torch.nn.Module):
        def __init__(self, model: Branches) -> None:
            super().__init__()
            for name in "abc":
                linear = torch.nn.Linear(4, 4)
                linear.weight.data = torch.from_numpy(getattr(model, name).weight.data.copy())
                linear.bias.data = torch.from_numpy(getattr(model, name).bias.data.copy())
                setattr(self, name, linear)

        forward = Branches.forward

    model = Branches()
    theirs = torch.nn.parallel.DistributedDataParallel(Net(model), find_unused_parameters=True)
    ours = DDP(model, find_unused_parameters=True)
    x = np.ones((2, 4), np.float32)
    for step in range(4):
        if step != 2:  # also onto gradients that stand
            ours.zero_grad(), theirs.zero_grad()
        use = ["ab", "a"][(world.rank + step) % 2]
        ours(x, use).sum().backward()
        theirs(torch.from_numpy(x), use).sum().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


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


def test_delayed_parameters_are_averaged_when_another_ones_gradient_is_there(world: World) -> None:
    model, alone = Branches(), Branches()
    late = [("c.weight", model.c.weight), ("c.bias", model.c.bias), ("b.bias", model.b.bias)]
    model.c.bias.data += world.rank
    ddp = DDP(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model.a.weight)
    assert_same_bits_everywhere({name: p.data for name, p in model.named_parameters()})
    assert sum(ddp.bucket_sizes_bytes()) == 4 * (16 + 4 + 16)
    for _ in range(2):
        ddp.zero_grad(), alone.zero_grad()
        for rank in range(world.size):
            (alone(np.full((2, 4), rank + 1, np.float32), "abc").sum() / world.size).backward()
        ddp(np.full((2, 4), world.rank + 1, np.float32), "abc").sum().backward()
        assert_same_bits_everywhere(gradients(ddp.module))
        assert_close(gradients(ddp.module), gradients(alone))
    ddp.detach()
    assert all(p.grad_slot is None and not p.post_accumulate_grad_hooks for p in model.parameters())


def test_static_graph_learns_what_is_unused(world: World) -> None:
    ddp = DDP(Branches(), static_graph=True)
    x = np.ones((2, 4), np.float32)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x, "ab" if world.rank == 0 else "a").sum().backward()
        assert ddp.module.c.weight.grad is None
        assert ddp.module.b.weight.grad is not None
        assert_same_bits_everywhere(gradients(ddp))


def test_parameters_to_ignore(world: World) -> None:
    model = mlp()
    DDP.set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    model[0].weight.data[...] = world.rank
    ddp = DDP(model)
    np.testing.assert_array_equal(model[0].weight.data, world.rank)
    step_of(ddp, np.ones((2, 5), np.float32) * (world.rank + 1), np.array([0, 1]))
    if world.size > 1:
        everybody: list[Any] = [None] * world.size
        dist.all_gather_object(everybody, model[0].weight.grad.tobytes())
        assert len(set(everybody)) > 1


# -- no_sync and weighted --------------------------------------------------------------------------------------------


def test_local_gradients_stay_local_until_a_reduced_backward(world: World) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(np.ones(1, np.float32))

        def forward(self, x: float) -> Tensor:
            return (self.w * x).sum()

    ddp = DDP(Scale())
    for x in (0.0, 1.0):
        with ddp.no_sync():
            ddp(x + world.rank).backward()
    np.testing.assert_allclose(ddp.module.w.grad, 1 + 2 * world.rank)
    ddp(2.0 + world.rank).backward()
    np.testing.assert_allclose(ddp.module.w.grad, 3 + 3 * (world.size - 1) / 2, rtol=1e-6)


def test_the_forward_decides_not_the_backward(world: World) -> None:
    ddp = DDP(mlp())
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


def test_no_sync_ends_with_an_error_in_it() -> None:
    ddp = DDP(mlp())
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    step_of(ddp, np.ones((2, 5), np.float32), np.array([0, 1]))
    assert ddp._reducer.backwards == 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}], ids=str)
def test_weighted_is_the_joined_batch_also_where_a_rank_has_no_samples(
    world: World, known: bool, options: dict[str, Any]
) -> None:
    alone = mlp()
    ddp = DDP(twin(alone), **options)
    for step in range(3):
        counts = [(rank + step) % world.size * 2 for rank in range(world.size)] if world.size > 1 else [3]
        total = sum(counts)
        x, y = batch(world.rng, total)
        start, n = sum(counts[: world.rank]), counts[world.rank]
        alone.zero_grad(), ddp.zero_grad()
        step_of(alone, x, y)
        with ddp.weighted(n, total if known else None):
            if n:
                step_of(ddp, x[start : start + n], y[start : start + n])
        assert_close(gradients(alone), gradients(ddp.module))
        assert_same_bits_everywhere(gradients(ddp))


def test_weighted_with_an_empty_batch_that_is_run(world: World) -> None:
    alone = mlp()
    ddp = DDP(twin(alone))
    x, y = batch(world.rng, 3 * max(world.size - 1, 1))
    n = 0 if world.rank == world.size - 1 and world.size > 1 else 3
    part = slice(3 * world.rank, 3 * world.rank + n)
    with np.errstate(all="ignore"), ddp.weighted(n):
        step_of(ddp, x[part], y[part])  # the mean over nothing is no number
    step_of(alone, x, y)
    assert_close(gradients(alone), gradients(ddp.module))


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


# -- buffers, modes, outputs -----------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@pytest.mark.parametrize(
    ("options", "synchronised"),
    [({}, True), ({"broadcast_buffers": False}, False), ({"forward_sync_buffers": False}, False)],
    ids=str,
)
def test_buffers_follow_the_first_rank_at_the_next_forward(
    world: World, options: dict[str, Any], synchronised: bool
) -> None:
    ddp = DDP(Normed(), **options)
    norm = ddp.module.norm
    for _ in range(2):
        step_of(ddp, *batch(np.random.default_rng(world.rank), 6))
    here = [b.copy() for b in ddp.buffers()]
    with no_grad():
        ddp.eval()(np.ones((2, 5), np.float32))  # an evaluation communicates nothing
        ddp.train()
    assert_equal(dict(enumerate(here)), dict(enumerate(ddp.buffers())))
    before = twin(ddp.module)
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, before.norm.running_mean)
    ddp(np.ones((2, 5), np.float32))
    before.norm.running_mean[...] = everybody[0 if synchronised else world.rank]
    before(np.ones((2, 5), np.float32))
    np.testing.assert_allclose(norm.running_mean, before.norm.running_mean, rtol=1e-6)
    assert (len({x.tobytes() for x in everybody}) == 1) == (world.size == 1)


def test_construction_copies_parameters_and_buffers_of_the_first_rank(world: World) -> None:
    model = Normed()
    for parameter in model.parameters():
        parameter.data += world.rank
    model.norm.running_mean += world.rank
    model.norm.num_batches_tracked += world.rank
    ddp = DDP(model)
    assert_equal(values(ddp.module), values(Normed()))
    np.testing.assert_array_equal(model.norm.running_mean, 0)
    assert model.norm.num_batches_tracked == 0
    assert model.norm.num_batches_tracked.shape == ()


def test_without_init_sync_values_stay(world: World) -> None:
    model = mlp()
    model[0].bias.data[...] = world.rank
    DDP(model, init_sync=False)
    np.testing.assert_array_equal(model[0].bias.data, world.rank)


def test_evaluation_mode_with_gradients_reduces_as_in_torch(world: World) -> None:
    ddp = DDP(Normed()).eval()
    step_of(ddp, *mine(world, *batch(world.rng, 2 * world.size)))
    assert_same_bits_everywhere(gradients(ddp))
    assert ddp._reducer.backwards == 1


def test_one_rank_may_evaluate_alone(world: World) -> None:
    ddp = DDP(Normed())
    step_of(ddp, *batch(world.rng, 4))
    if world.rank == 0:
        with no_grad():
            output = ddp.eval()(np.ones((2, 5), np.float32))
            assert not output.requires_grad
    ddp.train()
    step_of(ddp, *batch(world.rng, 4))


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    x: Any
    note: str


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    note: str


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


PACK: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda t: (t, 3), lambda o: o[0]),
    "list": (lambda t: [None, [t]], lambda o: o[1][0]),
    "dict": (lambda t: {"a": "text", "b": t}, lambda o: o["b"]),
    "ordered": (lambda t: OrderedDict(b=t), lambda o: o["b"]),
    "defaultdict": (lambda t: defaultdict(list, b=t), lambda o: o["b"]),
    "namedtuple": (lambda t: Point(1, t), lambda o: o.y),
    "nested": (lambda t: {"deep": [(t,)]}, lambda o: o["deep"][0][0]),
    "dataclass": (lambda t: Record(t, "n"), lambda o: o.x),
    "frozen": (lambda t: Frozen(t, "n"), lambda o: o.x),
    "opaque": (lambda t: Opaque(t), lambda o: o.hidden),
}


class Packing(nn.Module):
    def __init__(self, pack: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.pack = mlp(), pack

    def forward(self, x: Any) -> Any:
        return self.pack(self.inner(x))


@pytest.mark.parametrize("kind", PACK)
def test_outputs_of_every_kind_are_followed(world: World, kind: str) -> None:
    pack, unpack = PACK[kind]
    ddp = DDP(Packing(pack))
    x, y = mine(world, *batch(world.rng, 3 * world.size))
    output = ddp(x)
    assert type(output) is type(pack(None))
    F.cross_entropy(unpack(output), y).backward()
    assert ddp._reducer.backwards == 1
    assert_same_bits_everywhere(gradients(ddp))


@pytest.mark.parametrize("kind", PACK)
def test_an_evaluation_between_forward_and_backward_changes_nothing(world: World, kind: str) -> None:
    pack, unpack = PACK[kind]
    ddp = DDP(Packing(pack))
    x, y = mine(world, *batch(world.rng, 3 * world.size))
    output = ddp(x)
    with no_grad():
        ddp(x)
    F.cross_entropy(unpack(output), y).backward()
    assert ddp._reducer.backwards == 1
    assert_same_bits_everywhere(gradients(ddp))


@pytest.mark.parametrize("kind", sorted(PACK.keys() - {"opaque"}))
def test_each_of_two_outputs_has_its_reduced_backward(world: World, kind: str) -> None:
    pack, unpack = PACK[kind]
    ddp = DDP(Packing(pack))
    x, y = mine(world, *batch(world.rng, 3 * world.size))
    for output in [ddp(x), ddp(x)]:
        F.cross_entropy(unpack(output), y).backward()
    assert ddp._reducer.backwards == 2
    assert_same_bits_everywhere(gradients(ddp))


def test_an_output_that_hides_its_tensors_does_not_reduce_under_no_sync(world: World) -> None:
    ddp = DDP(Packing(Opaque))
    x, y = batch(world.rng, 3)
    ddp(x)
    with ddp.no_sync():
        F.cross_entropy(ddp(x).hidden, y).backward()
    assert ddp._reducer.backwards == 0


def test_several_forwards_before_one_backward(world: World) -> None:
    alone = mlp()
    ddp = DDP(twin(alone))
    parts = [batch(world.rng, 2 * world.size) for _ in range(3)]
    sum((F.cross_entropy(alone(x), y) for x, y in parts), start=0 * alone[0].bias.sum()).backward()
    total = 0 * F.cross_entropy(ddp(mine(world, *parts[0])[0]), mine(world, *parts[0])[1])
    for part in parts:
        x, y = mine(world, *part)
        total = total + F.cross_entropy(ddp(x), y)
    total.backward()
    assert ddp._reducer.backwards == 1
    assert_close(gradients(alone), gradients(ddp.module))


def test_two_backwards_of_two_forwards_add_up(world: World) -> None:
    ddp, plain = DDP(mlp()), mlp()
    parts = [mine(world, *batch(world.rng, 2 * world.size)) for _ in range(2)]
    losses = [F.cross_entropy(ddp(x), y) for x, y in parts]
    for loss in losses:
        loss.backward()
    sums: list[np.ndarray] = []
    for x, y in parts:
        plain.zero_grad()
        step_of(plain, x, y)
        dist.average_gradients(plain)
        sums.append(np.concatenate([p.grad.reshape(-1) for p in plain.parameters()]))
    found = np.concatenate([p.grad.reshape(-1) for p in ddp.parameters()])
    np.testing.assert_allclose(found, sums[0] + sums[1], rtol=1e-5, atol=1e-6)


def test_state_has_the_prefix_and_loads(world: World) -> None:
    ddp, other = DDP(mlp(seed=1)), DDP(mlp(seed=2))
    assert list(ddp.state_dict()) == ["module." + name for name in mlp().state_dict()]
    step_of(other, *batch(world.rng, 3))
    other.load_state_dict(ddp.state_dict())
    assert_equal(values(ddp), values(other))
    assert other.module[0].weight.data.base is other.module[2].weight.data.base


# -- errors ----------------------------------------------------------------------------------------------------------


class Failing(Function):
    """The identity, whose backward fails when it is told to."""

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


@pytest.mark.parametrize("who", ["all", "first", "last"])
@pytest.mark.parametrize("cap", [None, 0.00001])
@pytest.mark.parametrize("warm", [False, True])
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


@pytest.mark.parametrize("difference", ["count", "shape", "dtype", "name"])
def test_models_that_differ_are_an_error_on_every_rank(world: World, difference: str) -> None:
    if world.size == 1:
        DDP(mlp())
        return
    odd = world.rank == world.size - 1
    model: nn.Module = mlp()
    if odd:
        changed = {
            "count": lambda: mlp((5, 3)),
            "shape": lambda: mlp((5, 8, 6, 3)),
            "dtype": lambda: mlp(dtype="float64"),
            "name": lambda: nn.Sequential(OrderedDict((f"l{i}", layer) for i, layer in enumerate(mlp()))),
        }
        model = changed[difference]()
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
        DDP(model)
    assert f"{world.size - 1}" in str(caught.value)


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


def test_a_model_that_is_converted_after_wrapping_is_refused(world: World) -> None:
    ddp = DDP(mlp())
    ddp.module.convert(lambda array: array.astype(np.float64))
    with pytest.raises(RuntimeError, match=r"was float32 when .* is float64 now"):
        step_of(ddp, *batch(world.rng, 2))
    ddp.module.convert(lambda array: array.astype(np.float32)).zero_grad()
    for _ in range(2):
        ddp.zero_grad()
        step_of(ddp, *mine(world, *batch(world.rng, 2 * world.size)))
        assert_same_bits_everywhere(gradients(ddp))
        assert all(np.isfinite(p.grad).all() for p in ddp.parameters())


def test_wrong_arguments_are_refused(world: World) -> None:
    with pytest.raises(TypeError, match=r"mpiddp\.nn\.Module"):
        DDP(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        DDP(mlp(), bucket_cap_mb=1, bucket_cap_mb_list=[1])
    with pytest.raises(ValueError, match="positive"):
        DDP(mlp(), bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="positive"):
        DDP(mlp(), bucket_cap_mb=0)
    with pytest.raises(ValueError, match="device_ids"):
        DDP(mlp(), device_ids=[0, 1])
    with pytest.raises(ValueError, match=r"nn\.MixedPrecision"):
        DDP(mlp(), mixed_precision=object())
    with pytest.raises(ValueError, match="need to be set at the same time"):
        DDP(mlp(), delay_all_reduce_named_params=[])


def test_replicas_that_drift_are_found(world: World) -> None:
    ddp = DDP(mlp())
    ddp.check_replicas()
    if world.size == 1:
        return
    if world.rank == 1:
        ddp.module[2].bias.data[0] += 1
    with pytest.raises(dist.MismatchError, match=r"2\.bias.* rank 1 "):
        ddp.check_replicas()


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


def test_the_wrapped_model_can_be_copied(world: World) -> None:
    ddp = DDP(mlp())
    step_of(ddp, *batch(world.rng, 3))
    average = copy.deepcopy(ddp.module)
    step_of(average, *batch(world.rng, 3))  # a local matter
    assert ddp._reducer.backwards == 1
    assert not np.shares_memory(average[0].weight.data, ddp.module[0].weight.data)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))], ids=["copy", "pickle"])
def test_a_copy_of_the_wrapper_averages_on_its_own(world: World, way: Any) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.0002)
    step_of(ddp, *batch(np.random.default_rng(world.rank), 3))
    ddp.eval()
    twin = way(ddp)
    assert_equal(values(twin), values(ddp))
    assert twin.bucket_sizes_bytes() == ddp.bucket_sizes_bytes() and not twin.training
    before = {name: gradient.copy() for name, gradient in gradients(ddp).items()}
    twin.zero_grad()
    step_of(twin, *batch(np.random.default_rng(world.rank + 9), 3))
    assert_same_bits_everywhere(gradients(twin))
    assert_equal(gradients(ddp), before)


def test_a_wrapper_in_another_group_says_what_to_copy(world: World) -> None:
    group = dist.new_group(list(range(world.size)))
    with pytest.raises(RuntimeError, match=r"only supported .* with the default process group.*ddp\.module"):
        copy.deepcopy(DDP(mlp(), process_group=group))
    dist.destroy_process_group(group)


def test_a_model_that_is_let_go_is_local_again(world: World) -> None:
    model, alone = mlp(), mlp()
    first = DDP(model)
    first.detach()
    x, y = batch(np.random.default_rng(world.rank), 3)
    step_of(first, x, y), step_of(alone, x, y)
    assert_equal(gradients(model), gradients(alone))
    assert all(p.grad_slot is None and not p.post_accumulate_grad_hooks for p in model.parameters())
    second = DDP(model)
    second.zero_grad()
    step_of(second, x, y)
    assert_same_bits_everywhere(gradients(model))


# -- hooks on buffers, and what is to know ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", list(dist.BufferCommHookLocation))
def test_a_hook_on_buffers_takes_the_place_of_the_broadcast(world: World, where: Any) -> None:
    ddp = DDP(Normed())
    calls: list[set[str]] = []

    def average(state: list[set[str]], buffers: dict[str, np.ndarray]) -> list[Any]:
        state.append(set(buffers))
        return [dist.all_reduce(buffers["norm.running_mean"], dist.ReduceOp.AVG, async_op=True)]

    ddp.register_buffer_comm_hook(calls, average, where)
    rng = np.random.default_rng(world.rank)
    for _ in range(3):
        step_of(ddp, *batch(rng, 6))
    assert calls == [{"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}] * 2
    if where is dist.BufferCommHookLocation.POST_FORWARD:
        assert_same_bits_everywhere({"mean": ddp.module.norm.running_mean})


def test_logging_data_has_torchs_names_and_true_numbers(world: World) -> None:
    torch = gloo()
    model = mlp()
    theirs = torch.nn.parallel.DistributedDataParallel(torch_mlp(torch, model))
    ours = DDP(model, bucket_cap_mb=0.0001)
    for _ in range(3):
        x, y = batch(world.rng, 3)
        step_of(ours, x, y)
        torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    data, expected = ours.logging_data(), theirs._get_ddp_logging_data()
    same = ["world_size", "rank", "total_parameter_size_bytes", "num_parameter_tensors", "find_unused_parameters"]
    assert [data[name] for name in same] == [expected[name] for name in same]
    assert data["iteration"] == 3 and data["module_name"] == "Sequential"
    assert data["bucket_sizes"] == ", ".join(map(str, ours.bucket_sizes_bytes()))
    assert data["num_buckets_reduced"] == len(ours.bucket_sizes_bytes()) > 1
    assert data["prev_iteration_grad_ready_order_indices"].split(", ")[0] in {"4", "5"}
    for name in ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap"):
        assert 0 <= data[f"{name}_time"] < 60e9 and 0 <= data[f"avg_{name}_time"] < 60e9
    assert data["backward_compute_comm_overlap_time"] <= data["backward_comm_time"]
    assert ours.exposed_s >= 0

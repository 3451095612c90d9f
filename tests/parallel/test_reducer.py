"""DistributedDataParallel's gradients: in buckets, in the order in which they come."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.learning import (
    assert_close,
    assert_equal,
    assert_same_bits_everywhere,
    batch,
    gradients,
    mlp,
    module,
    step_of,
    twin,
    values,
)
from harness.world import World

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor
from mpiddp.distributed import groups
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


def test_gradients_are_views_of_their_buckets_and_neighbours(world: World) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.0002)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step_of(ddp, *batch(world.rng, 4))
        optimizer.step()
        buckets = ddp._reducer.buckets
        assert len(buckets.in_order) > 1
        for bucket in buckets.in_order:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                assert parameter.grad is gradient
                assert np.shares_memory(parameter.grad, bucket.buffer())
            assert sum(g.size for g in bucket.gradients()) == bucket.buffer().size
    total = sum(bucket.buffer().nbytes for bucket in buckets.in_order)
    assert total == sum(parameter.data.nbytes for parameter in ddp.parameters())
    assert len(optimizer._runs[0].of(list(ddp.parameters()))) == 1, "a step is one stretch of memory"


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
    def forward(model: Any, x: float) -> Any:
        total = (model.big * x).sum()
        for index in range(300):
            total = total + (getattr(model, f"p{index}") * (index + x)).sum()
        return total

    small = {f"p{index}": np.ones(index % 3, np.float32) for index in range(300)}
    ddp = DDP(module(forward, big=np.ones((300, 1000), np.float32), **small), bucket_cap_mb=0.001)
    for _ in range(2):
        ddp.zero_grad()
        ddp(float(world.rank)).backward()
        mean = (world.size - 1) / 2
        np.testing.assert_allclose(ddp.module.big.grad, mean, rtol=1e-6)
        for index in range(300):
            np.testing.assert_allclose(getattr(ddp.module, f"p{index}").grad, index + mean, rtol=1e-6)


@pytest.mark.parametrize("second", ["float64", "float16", "complex64"])
def test_dtypes_have_buckets_of_their_own(world: World, second: str) -> None:
    parameters = {f"p{index}": np.ones(5, second if index % 2 else "float32") for index in range(6)}
    model = module(lambda model, x: [parameter * x for parameter in model.parameters()], **parameters)
    ddp = DDP(model, bucket_cap_mb=0.00003)
    for _ in range(2):
        ddp.zero_grad()
        outputs = ddp(float(world.rank + 1))
        total: Any = None
        for output in outputs:
            part = output.to("float64").sum() if output.dtype.kind == "f" else (output * output).abs().sum()
            total = part if total is None else total + part
        total.backward()
        assert {bucket.buffer().dtype.name for bucket in ddp._reducer.buckets.in_order} == {"float32", second}
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
        return "".join(names[id(b.parameters()[-1])] for b in ddp._reducer.buckets.in_order)

    assert order() == "cba"
    x = world.rng.standard_normal((4, 16)).astype(np.float32)
    buffers = []
    for _ in range(3):
        ddp.zero_grad(), plain.zero_grad()
        F.mse_loss(ddp(x), 0 * x).backward()
        F.mse_loss(plain(x), 0 * x).backward()
        assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7)
        assert order() == "bac"
        buffers.append([id(bucket.buffer()) for bucket in ddp._reducer.buckets.in_order])
    assert buffers[0] == buffers[1] == buffers[2]
    assert_equal(values(model), values(plain))


def test_a_bucket_of_a_group_that_has_ended_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def backward_after(end: Callable[[dist.ProcessGroup], None], reason: str) -> dist.ProcessGroup:
        group = dist.new_group()
        ddp = DDP(mlp(), process_group=group)
        x, y = batch(world.rng, 4)
        step_of(ddp, x, y)  # the group keeps plans of the buckets
        loss = F.cross_entropy(ddp(x), y)
        end(group)
        with pytest.raises(ValueError, match=reason):
            loss.backward()
        return group

    def leave_to_the_parent(group: dist.ProcessGroup) -> None:
        """End it as in a forked child, which must not use MPI."""
        for name, value in (("_groups", {group: None}), ("_default", None), ("_made", 0), ("_missing", "")):
            monkeypatch.setattr(groups, name, value)
        groups.disown("a forked process")

    backward_after(dist.destroy_process_group, "has been destroyed")
    group = backward_after(leave_to_the_parent, "a forked process")
    monkeypatch.undo()
    group._link.closed = False
    dist.destroy_process_group(group)

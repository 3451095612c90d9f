"""Communication hooks: their results, and the shipped ones' values."""

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
    share,
    step_of,
)
from harness.world import World

import mpiddp as dist
from mpiddp import nn

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


def reduced(world: World, hook: Callable[..., Any] | None, state: Any = None, steps: int = 2, **options: Any) -> Any:
    """Return the gradients of the last of some steps with a hook, None for none."""
    ddp = DDP(mlp((5, 12, 9, 3)), **options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    rng = np.random.default_rng(11)
    for _ in range(steps):
        ddp.zero_grad()
        x, y = batch(rng, 3 * world.size)
        step_of(ddp, share(x, world.rank, world.size), share(y, world.rank, world.size))
    assert_same_bits_everywhere(gradients(ddp))
    return gradients(ddp)


def torchs_body(process_group: Any, bucket: Any) -> Any:
    """Torch's allreduce_hook; ``tensor.div_(n)`` is spelled ``tensor /= n`` on arrays."""
    group_to_use = process_group if process_group is not None else dist.group.WORLD
    tensor = bucket.buffer()
    tensor /= group_to_use.size()
    return dist.all_reduce(tensor, group=group_to_use, async_op=True).get_future().then(lambda fut: fut.value()[0])


def a_work(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)


def a_work_elsewhere(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().copy(), dist.ReduceOp.AVG, async_op=True)


def a_list(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().copy(), dist.ReduceOp.AVG, async_op=True).get_future()


def another_dtype(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().astype("float64"), dist.ReduceOp.AVG, async_op=True)


def chained(_: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().copy(), async_op=True)
    halves = work.get_future().then(lambda fut: fut.value()[0] / 2)
    return halves.then(lambda fut: fut.value() * (2 / dist.get_world_size()))


def a_tensor(_: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda fut: nn.Parameter(fut.value()[0]))


@pytest.mark.parametrize("cap", [None, 0.0002])
def test_every_way_to_return_the_average(world: World, cap: float | None) -> None:
    expected = reduced(world, None, bucket_cap_mb=cap)
    for hook in (torchs_body, a_work, a_work_elsewhere, a_list, another_dtype, chained, a_tensor, dist.allreduce_hook):
        assert_close(reduced(world, hook, bucket_cap_mb=cap), expected, atol=1e-7)


def answering(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


def then(after: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook with a callback behind the average."""
    return lambda _, bucket: a_work(None, bucket).get_future().then(after)


NO_WORK = r"callback must return a Work or a Future object, but got (builtins|numpy)\."
NO_ARRAY = r"future must hold an array of \d+ elements"


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        *((answering(answer), RuntimeError, NO_WORK) for answer in (3, None, "text", np.ones(3))),
        *((then(answering(x)), RuntimeError, NO_ARRAY) for x in (3, None, [], np.ones(3), [np.ones((2, 2))], "text")),
        (then(lambda _: 1 / 0), ZeroDivisionError, "division by zero"),
    ],
)
def test_wrong_answers_and_errors_surface_in_backward(world: World, hook: Any, error: Any, text: str) -> None:
    ddp = DDP(mlp())
    ddp.register_comm_hook(None, hook)
    with pytest.raises(error, match=text):
        step_of(ddp, *batch(world.rng, 3))
    ddp._reducer._pending.clear()


def test_registration_is_for_one_hook_and_before_the_first_backward(world: World) -> None:
    ddp = DDP(mlp())
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 3)  # type: ignore[arg-type]
    ddp.register_comm_hook(None, dist.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, dist.allreduce_hook)
    late = DDP(mlp())
    step_of(late, *batch(world.rng, 3))
    with pytest.raises(RuntimeError, match="before the first backward"):
        late.register_comm_hook(None, dist.allreduce_hook)


def test_a_hook_sees_the_state_and_the_buckets_in_order(world: World) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(state: Any, bucket: Any) -> Any:
        total = sum(g.size for g in bucket.gradients())
        assert bucket.buffer().shape == (total,)
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append((state, bucket.index(), bucket.is_last(), float(bucket.buffer().sum())))
        return dist.noop_hook(state, bucket)

    ddp, alone = DDP(mlp(), bucket_cap_mb=0.0001), mlp()
    ddp.register_comm_hook("state", look)
    x, y = batch(np.random.default_rng(world.rank), 3)
    step_of(ddp, x, y), step_of(alone, x, y)
    count = len(ddp.bucket_sizes_bytes())
    assert [entry[:3] for entry in seen] == [("state", i, i == count - 1) for i in range(count)]
    whole = sum(p.grad.sum() for p in alone.parameters())
    assert sum(entry[3] for entry in seen) == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert_equal(gradients(ddp.module), gradients(alone))  # neither divided by anything nor reduced


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_half_precision_is_the_average_rounded_twice(world: World, kind: str) -> None:
    bits = 11 if kind == "fp16" else 8
    hook = {"fp16": dist.fp16_compress_hook, "bf16": dist.bf16_compress_hook}[kind]
    exact, found = reduced(world, None), reduced(world, hook)
    distinct = 0
    for name, gradient in exact.items():
        bound = 4 * 2.0**-bits * np.abs(gradient).max() + 1e-6
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=bound, err_msg=name)
        distinct += int((found[name] != gradient).sum())
        assert found[name].dtype == np.float32
    assert distinct > 0, "nothing was rounded"


def test_dividing_first_keeps_large_sums_in_range(world: World) -> None:
    model = nn.Linear(1, 1, bias=False)
    ddp = DDP(model)
    ddp.register_comm_hook(None, dist.fp16_compress_hook)
    ddp(np.full((1, 1), 60_000, np.float32)).sum().backward()
    np.testing.assert_allclose(model.weight.grad, 60_000, rtol=2e-3)


def test_what_is_half_already_and_what_is_complex_travels_as_it_is(world: World) -> None:
    def forward(model: Any, x: float) -> Any:
        return (model.half * x).to("float64").sum() + (model.whole * x).abs().sum()

    ddp = DDP(module(forward, half=np.ones(4, np.float16), whole=np.ones(4, np.complex64)))
    ddp.register_comm_hook(None, dist.fp16_compress_hook)
    ddp(float(world.rank + 1)).backward()
    np.testing.assert_allclose(ddp.module.half.grad, (world.size + 1) / 2, rtol=2e-3)
    np.testing.assert_allclose(ddp.module.whole.grad, (world.size + 1) / 2, rtol=1e-6)

"""A wrapped model from its forward to the end of its backward: outputs, errors, refusals."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mine, mlp, step_of, twin
from harness.world import World

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Function, no_grad
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


Point = namedtuple("Point", "x y")


Record = dataclasses.make_dataclass("Record", ["x", "note"])
Frozen = dataclasses.make_dataclass("Frozen", ["x", "note"], frozen=True, slots=True)


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
def test_outputs_of_every_kind_are_followed_also_after_an_evaluation(world: World, kind: str) -> None:
    pack, unpack = PACK[kind]
    ddp = DDP(Packing(pack))
    x, y = mine(world, *batch(world.rng, 3 * world.size))
    outputs = [ddp(x) for _ in range(1 if kind == "opaque" else 2)]
    with no_grad():
        ddp(x)
    for output in outputs:
        assert type(output) is type(pack(None))
        F.cross_entropy(unpack(output), y).backward()
    assert ddp._reducer.backwards == len(outputs)
    assert_same_bits_everywhere(gradients(ddp))
    plain = mlp()
    step_of(plain, x, y)
    dist.average_gradients(plain)
    assert_close(gradients(ddp.module.inner), {name: len(outputs) * p for name, p in gradients(plain).items()})


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


@pytest.mark.parametrize(
    ("who", "cap", "warm"), [("all", 1e-5, True), ("first", None, False), ("first", 1e-5, True), ("last", 1e-5, False)]
)
def test_a_step_after_an_error_in_backward_is_good(
    world: World, monkeypatch: pytest.MonkeyPatch, who: str, cap: float | None, warm: bool
) -> None:
    ddp, alone = DDP(Breakable(), bucket_cap_mb=cap), Breakable()
    if warm:
        step_of(ddp, *batch(world.rng, 3))
        ddp.zero_grad()
    x, y = batch(world.rng, 2 * world.size)
    part = mine(world, x, y)
    fails = who == "all" or world.rank == (0 if who == "first" else world.size - 1)
    monkeypatch.setattr(Failing, "fail", fails)
    loss = F.cross_entropy(ddp(part[0]), part[1])
    if fails:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        Failing.fail = False
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
    with pytest.raises(TypeError, match=r"mpiddp\.nn\.Module, and mpiddp\.torch\..*, got builtins\.function"):
        DDP(lambda x: x)
    for options, text in (
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, "not both"),
        ({"bucket_cap_mb": -1}, "positive"),
        ({"bucket_cap_mb": 0}, "positive"),
        ({"device_ids": [0, 1]}, "device_ids"),
        ({"mixed_precision": object()}, "fp16_compress_hook or bf16_compress_hook"),
    ):
        with pytest.raises(ValueError, match=text):
            DDP(mlp(), **options)

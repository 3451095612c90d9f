"""Outputs of a wrapped model, and events between its forward and its backward."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, batch, gradients, mine, mlp, step_of, twin
from harness.world import World

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import no_grad
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


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

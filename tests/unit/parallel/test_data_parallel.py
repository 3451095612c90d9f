"""DataParallel: the model on the parts of a batch, in threads."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from mpiddp import nn, optim
from mpiddp.autograd import Tensor, no_grad
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.parallel import DataParallel
from mpiddp.parallel.data_parallel import gather, parallel_apply, replicate, scatter
from mpiddp.training.models import MLP

Pair = namedtuple("Pair", "a b")
DOCUMENTED_MB = (3.8, 1.7)
"""What DataParallel's docstring says of its first device and of the others."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 2)
        self.sizes: list[int] = []
        self.threads: list[str] = []

    def forward(self, x: Any) -> Tensor:
        self.sizes.append(len(x))
        self.threads.append(threading.current_thread().name)
        return self.two(F.relu(self.one(x)))


@pytest.mark.parametrize(
    ("n", "devices", "sizes"),
    [(30, 1, [30]), (30, 2, [15, 15]), (30, 3, [10, 10, 10]), (7, 3, [3, 3, 1]), (2, 4, [1, 1]), (9, 4, [3, 3, 3])],
)
def test_parts_outputs_and_gradients(n: int, devices: int, sizes: list[int]) -> None:
    plain, model = Net(), DataParallel(Net(), ["cpu"] * devices)
    x = np.random.default_rng(0).standard_normal((n, 5)).astype(np.float32)
    output = model(x)
    assert sorted(model.module.sizes, reverse=True) == sizes
    np.testing.assert_allclose(output.data, plain(x).data, rtol=1e-5, atol=1e-6)
    F.mse_loss(output, np.ones((n, 2), np.float32)).backward()
    F.mse_loss(plain(x), np.ones((n, 2), np.float32)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_it_trains_as_the_model_does() -> None:
    plain, wrapped = Net(), Net()
    model = DataParallel(wrapped)
    rng = np.random.default_rng(1)
    optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for _ in range(5):
        x, y = rng.standard_normal((8, 5)).astype(np.float32), rng.integers(0, 2, 8)
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(p.data, q.data, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == ["module." + name for name in plain.state_dict()]


def test_parts_run_in_threads_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=10)

    class Meeting(nn.Module):
        def forward(self, x: Any) -> Any:
            barrier.wait()  # breaks unless all three are here
            return Tensor(x)

    assert DataParallel(Meeting(), ["cpu"] * 3)(np.zeros((3, 1), np.float32)).shape == (3, 1)


def test_gradients_reach_the_input_and_no_grad_reaches_the_threads() -> None:
    model = DataParallel(Net())
    x = Tensor(np.ones((4, 5), np.float32), requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and np.abs(x.grad).min() > 0
    with no_grad():
        assert not model(x).requires_grad


def test_buffers_of_the_first_part_are_the_models() -> None:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    x = np.random.default_rng(2).standard_normal((8, 3)).astype(np.float32)
    DataParallel(norm)(x)
    np.testing.assert_allclose(norm.running_mean, x[:4].mean(axis=0), rtol=1e-5)
    assert norm.num_batches_tracked == 1


def test_shared_modules_and_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.again = self.one
            self.two = nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Any) -> Any:
            assert self.one is self.again and self.two.weight is self.one.weight
            return self.two(self.again(x))

    nn.manual_seed(0)
    model = Tied()
    x = np.ones((4, 3), np.float32)
    DataParallel(model)(x).sum().backward()
    found = model.one.weight.grad.copy()
    model.zero_grad()
    model(x).sum().backward()
    np.testing.assert_allclose(found, model.one.weight.grad, rtol=1e-5)


def test_an_error_names_its_replica() -> None:
    class Failing(nn.Module):
        def forward(self, x: Any) -> Any:
            if x[0, 0] == 2:
                raise KeyError("here")
            return Tensor(x)

    with pytest.raises(KeyError, match="here") as caught:
        DataParallel(Failing())(np.array([[1.0], [2.0]]))
    assert any("replica 1 of 2" in note for note in caught.value.__notes__)


def test_nested_arguments_are_cut_and_the_rest_is_handed_to_all() -> None:
    x = np.arange(6)
    parts = scatter((Pair(x, "s"), {"k": [x, 3]}, None), 2)
    assert len(parts) == 2
    for part, expected in zip(parts, ([0, 1, 2], [3, 4, 5]), strict=True):
        np.testing.assert_array_equal(part[0].a, expected)
        np.testing.assert_array_equal(part[1]["k"][0], expected)
        assert part[0].b == "s" and part[1]["k"][1] == 3 and part[2] is None
    assert len(scatter(("no batch",), 3)) == 1
    np.testing.assert_array_equal(scatter(np.arange(6).reshape(2, 3), 2, dim=-1)[1], [[2], [5]])


def test_nested_outputs_are_joined() -> None:
    halves = [{"a": (Tensor([1.0]), [np.zeros(2)]), "b": None, "c": Tensor(3.0)} for _ in range(2)]
    joined = gather(halves)
    assert joined["a"][0].tolist() == [1, 1] and joined["a"][1][0].shape == (4,)
    assert joined["b"] is None and joined["c"].tolist() == [3, 3]
    with pytest.raises(TypeError, match="got str"):
        gather(["a", "b"])


@pytest.mark.parametrize("devices", [[], ["cuda:0"], [0, 1]])
def test_other_devices_are_refused(devices: list[Any]) -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        DataParallel(Net(), devices)


def tape_arrays(output: Tensor) -> list[np.ndarray]:
    """Return the arrays that the tape behind a tensor keeps for backward, its inputs among them."""
    nodes, arrays = [output.grad_fn], [output.data]
    for node in nodes:
        arrays += [value for value in vars(node).values() if isinstance(value, np.ndarray)]
        nodes += [edge for edge in node.edges or () if edge is not None and hasattr(edge, "edges")]
    return arrays


def memory_bytes(arrays: list[np.ndarray]) -> int:
    """Return the size of the memory that arrays cover, each root of views counted once."""
    roots: dict[int, int] = {}
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        roots[id(array)] = array.nbytes
    return sum(roots.values())


def test_the_first_device_would_hold_more_than_twice_what_the_second_holds() -> None:
    model = MLP()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rng = np.random.default_rng(0)
    parts = [part.copy() for part in scatter(rng.standard_normal((128, 1, 28, 28), np.float32), 2)]
    outputs = parallel_apply(replicate(model, 2), [((part,), {}) for part in parts])
    parameters = [p.data for p in model.parameters()]
    kept = [memory_bytes([*parameters, part, *tape_arrays(y)]) for part, y in zip(parts, outputs, strict=True)]
    output = gather(outputs)
    F.nll_loss(output, rng.integers(0, 10, 128)).backward()
    optimizer.step()
    gathered = memory_bytes([output.data])
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    owned = memory_bytes([*(p.grad for p in model.parameters()), *momenta])
    assert kept[0] == kept[1]  # replicas of parameters, and what each part leaves for backward
    assert owned == 2 * memory_bytes(parameters)
    first, second = kept[0] + gathered + owned, kept[1]
    assert (round(first / 1e6, 1), round(second / 1e6, 1)) == DOCUMENTED_MB
    assert all(f"{megabytes} MB" in " ".join((DataParallel.__doc__ or "").split()) for megabytes in DOCUMENTED_MB)

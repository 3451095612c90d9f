import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.autograd import Tensor, no_grad
from mpiddp.device import is_device_array
from mpiddp.device.place import moved
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.parallel import DataParallel
from mpiddp.parallel.data_parallel import gather, scatter

Pair = namedtuple("Pair", "a b")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 2)
        self.sizes: list[int] = []

    def forward(self, x: Any) -> Tensor:
        self.sizes.append(len(x))
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
    parts = scatter((Pair(x, "s"), {"k": [x, 3]}, None), [None, None])
    assert len(parts) == 2
    for part, expected in zip(parts, ([0, 1, 2], [3, 4, 5]), strict=True):
        np.testing.assert_array_equal(part[0].a, expected)
        np.testing.assert_array_equal(part[1]["k"][0], expected)
        assert part[0].b == "s" and part[1]["k"][1] == 3 and part[2] is None
    assert len(scatter(("no batch",), [None] * 3)) == 1
    np.testing.assert_array_equal(scatter(np.arange(6).reshape(2, 3), [None, None], dim=-1)[1], [[2], [5]])


def test_nested_outputs_are_joined() -> None:
    halves = [{"a": (Tensor([1.0]), [np.zeros(2)]), "b": None, "c": Tensor(3.0)} for _ in range(2)]
    joined = gather(halves)
    assert joined["a"][0].tolist() == [1, 1] and joined["a"][1][0].shape == (4,)
    assert joined["b"] is None and joined["c"].tolist() == [3, 3]
    with pytest.raises(TypeError, match="got str"):
        gather(["a", "b"])


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([], "one or more GPUs"),
        (["cpu", 0], "DistributedDataParallel"),
        ([0, 2], "cuda:2: this process sees 2 GPUs"),
        ([-1], "cuda:-1: this process sees 2 GPUs"),
        (["float32"], "one or more GPUs"),
        (["gpu"], "got 'gpu'"),
    ],
)
def test_other_devices_are_refused(cupy: Any, devices: list[Any], said: str) -> None:
    with pytest.raises(ValueError if devices != ["gpu"] else TypeError, match=said):
        DataParallel(Net(), devices)


def test_without_gpus_their_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot move to cuda:0: "):
        DataParallel(Net(), [0])


class Mixed(nn.Module):
    """Convolution, batch norm, a module and a parameter that are there twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(2)
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.one, self.two, self.idle = nn.Linear(3 * 16, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.again, self.tied = self.two, nn.Linear(6, 6, bias=False)
        self.tied.weight = self.two.weight
        self.places: list[tuple[int, int]] = []

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        import cupy

        x = self.norm(self.conv(x))
        self.places.append((cupy.cuda.runtime.getDevice(), x.data.device.id))
        assert self.two is self.again and self.tied.weight is self.two.weight
        hidden = self.tied(F.relu(self.again(self.one(F.relu(x).flatten(1)))))
        return {"y": hidden * scale, "norm": (hidden * hidden).sum()}


@pytest.mark.parametrize(("n", "output", "current"), [(1, 1, 0), (5, None, 0), (5, "cpu", 1), (8, None, 1)])
def test_several_devices_give_what_one_thread_gives(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, n: int, output: Any, current: int
) -> None:
    """Each part has batch norm's statistics of its own, so the reference runs the same parts one after the other."""
    monkeypatch.setattr(cupy._late, "PER_THREAD", bool(current))  # CUPY_CUDA_PER_THREAD_DEFAULT_STREAM
    plain, wrapped = Mixed(), Mixed()
    parts = [slice(0, -(-n // 2)), slice(-(-n // 2), n)][: min(n, 2)]
    wrapped.convert(lambda array: moved(array, 0))
    plain.convert(lambda array: moved(array, 0))
    rng = np.random.default_rng(n)
    x, scale = rng.standard_normal((n, 1, 6, 6), np.float32), rng.standard_normal((n, 1), np.float32)
    there = cupy.asarray(x)
    outputs = [plain(there[part], cupy.asarray(scale[part])) for part in parts[::-1]][::-1]  # the model's statistics
    plain_loss = sum((each["y"] * each["y"]).sum() + each["norm"] for each in outputs)
    plain_loss.backward()

    model = DataParallel(wrapped, [0, "cuda:1"], output)
    place = {None: 0, 1: 1, "cpu": None}[output]
    leaf = Tensor(there, requires_grad=True)  # on a device, and a host array beside it
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Device(current), cupy.cuda.Stream(non_blocking=True):
        found = model(leaf, scale=scale)
        with cupy.cuda.Device(place or 0):
            loss = (found["y"] * found["y"]).sum() + found["norm"].sum()
            loss.backward()
        assert cupy.cuda.runtime.getDevice() == current
    cupy.cuda.runtime.deviceSynchronize()
    assert sorted(wrapped.places) == [(0, 0), (1, 1)][: len(parts)]
    assert is_device_array(found["y"].data) == (place is not None)
    assert place is None or found["y"].data.device.id == place
    expected = np.concatenate([each["y"].detach().numpy() for each in outputs])
    np.testing.assert_array_equal(moved(found["y"].data, None), expected)
    assert leaf.grad is not None and leaf.grad.device.id == 0
    for (name, p), q in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("idle"):
            assert p.grad is None and q.grad is None
            continue
        assert p.grad.device.id == 0, name
        np.testing.assert_allclose(p.grad.get(), q.grad.get(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_of_branches_on_two_devices_are_added_where_the_tensor_is(cupy: Any, first: int) -> None:
    x = Tensor(cupy.asarray(np.arange(3, dtype=np.float32)), requires_grad=True)
    hidden = x * 2.0

    def elsewhere() -> Tensor:
        with cupy.cuda.Device(1):
            return (hidden.to("cuda:1") * 4.0).to("cuda:0")

    branches = [lambda: hidden * 3.0, elsewhere]
    one, other = branches[first](), branches[1 - first]()
    (one + other).sum().backward()
    assert x.grad is not None and x.grad.device.id == 0 and cupy.cuda.runtime.getDevice() == 0
    np.testing.assert_array_equal(x.grad.get(), np.full(3, 14, np.float32))


def test_buffers_of_the_first_device_are_the_models(cupy: Any) -> None:
    norm = nn.BatchNorm1d(3, momentum=1.0).convert(lambda array: moved(array, 0))
    x = np.random.default_rng(2).standard_normal((8, 3)).astype(np.float32)
    assert DataParallel(norm).device_ids == ["cuda:0", "cuda:1"]
    DataParallel(norm)(x)
    np.testing.assert_allclose(norm.running_mean.get(), x[:4].mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("where", [None, 1])
def test_a_model_that_is_elsewhere_is_refused(cupy: Any, where: int | None) -> None:
    model = DataParallel(Net().convert(lambda array: moved(array, where)), [0, 1])
    with pytest.raises(RuntimeError, match=r"on device cuda:0 \(device_ids\[0\]\) but found"):
        model(np.zeros((4, 5), np.float32))

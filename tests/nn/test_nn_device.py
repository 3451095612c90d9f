"""Models on a device: the same code and numbers as on the host, and no waiting but for the loss.

The device is a fake that does its work late (see ``harness.faking``): without a wait one reads old values.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiddp import nn, optim
from mpiddp.autograd import Tensor, no_grad
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.nn.random import keep_mask, scrambled

from .test_functional import CASES, shown

ONE_WAIT = ["get", "synchronize of Stream"]
"""A copy to the host, which waits for its stream."""


def net() -> nn.Module:
    """Return the tutorial's network, without dropout."""
    first, second = nn.Conv2d(1, 4, kernel_size=3), nn.Conv2d(4, 6, kernel_size=3, padding=1, stride=2)
    convolutions = (first, nn.MaxPool2d(2), nn.ReLU(), second, nn.ReLU(), nn.Flatten())
    return nn.Sequential(*convolutions, nn.Linear(24, 11), nn.ReLU(), nn.Linear(11, 5), nn.LogSoftmax(1))


def mlp(width: int = 9) -> nn.Module:
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),  # whose gradient would be zero but for rounding
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Sigmoid(),
        nn.Linear(100, 5),
    )


IMAGES, ROWS = (6, 1, 10, 10), (6, 7)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "net": (net, IMAGES),
    "mlp": (mlp, ROWS),
    "normed": (normed, IMAGES),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
}


def batches(shape: tuple[int, ...], steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(steps):
        x = rng.standard_normal(shape).astype(np.float32)
        made.append((x, rng.integers(0, 5, shape[0])))
    return made


def train(model: nn.Module, optimizer: optim.Optimizer, data: Any) -> list[float]:
    """Return the losses."""
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_host(cupy: Any, waits: list[str], name: str, optimizer: str) -> None:
    make, shape = MODELS[name]
    nn.manual_seed(5)
    there = make()
    here = copy.deepcopy(there)
    there.convert(cupy.asarray)
    data = batches(shape, steps=3)
    expected = train(here, OPTIMIZERS[optimizer](here.parameters()), data)
    moved = [(cupy.asarray(x), cupy.asarray(y)) for x, y in data]
    found = train(there, OPTIMIZERS[optimizer](there.parameters()), moved)
    assert waits == 3 * ONE_WAIT, "to read the loss"
    assert found == pytest.approx(expected, rel=1e-5)
    for key, value in there.state_dict().items():
        assert isinstance(value, cupy.ndarray)
        np.testing.assert_allclose(value.get(), here.state_dict()[key], rtol=2e-4, atol=1e-5, err_msg=key)
    with no_grad():
        evaluated = there.eval()(cupy.asarray(data[0][0])).numpy()
        np.testing.assert_allclose(evaluated, here.eval()(data[0][0]).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "inputs", "options"), CASES, ids=map(shown, CASES))
def test_functions_are_those_of_the_host(
    cupy: Any, waits: list[str], name: str, inputs: list[Any], options: dict[str, Any]
) -> None:
    found = []
    for there in (False, True):
        given = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in inputs]
        given = [cupy.asarray(x) if there and isinstance(x, np.ndarray) else x for x in given]
        leaves = [Tensor(x, requires_grad=x.dtype == np.float32) if hasattr(x, "dtype") else x for x in given]
        output = getattr(F, name)(*leaves, **options)
        output.backward(output.data * 0 + 1)
        assert waits == []
        gradients = [x.grad for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found.append([output.data, *gradients])
    for here, other in zip(*found, strict=True):
        assert isinstance(other, cupy.ndarray) and other.dtype == here.dtype
        np.testing.assert_allclose(other.get(), here, rtol=1e-4, atol=1e-5)


def test_a_model_goes_to_devices_and_back(cupy: Any) -> None:
    model = normed()
    here = {key: value.copy() for key, value in model.state_dict().items()}
    parameters = list(model.parameters())
    for wanted, number in [("cuda", 0), ("cuda:1", 1), (0, 0)]:
        assert model.to(wanted) is model
        assert all(value.device.id == number for value in model.state_dict().values())
    kept = model.state_dict()
    assert all(value is kept[key] for key, value in model.cuda().state_dict().items())
    with cupy.cuda.Device(1):
        assert all(value.device.id == 1 for value in model.cuda().state_dict().values())
    for key, value in model.cpu().state_dict().items():
        assert isinstance(value, np.ndarray) and np.array_equal(value, here[key]), key
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    with pytest.raises(ValueError, match="cuda:7: this process sees 2 GPUs"):
        model.to(7)


def test_states_go_from_host_to_device_and_back(cupy: Any) -> None:
    there, here = mlp().convert(cupy.asarray), mlp()
    here.load_state_dict(there.state_dict())
    for value, own in zip(there.state_dict().values(), here.state_dict().values(), strict=True):
        assert np.array_equal(value.get(), own)
    here[0].weight.data += 1
    there.load_state_dict(here.state_dict())
    assert np.array_equal(there[0].weight.data.get(), here[0].weight.data)
    x = batches(ROWS, 1)[0]
    mine, theirs = optim.Adam(here.parameters()), optim.Adam(there.parameters())
    train(here, mine, [x])
    theirs.load_state_dict(mine.state_dict())
    moved = theirs.state_dict()["state"][0]["exp_avg"]
    assert isinstance(moved, cupy.ndarray)
    assert np.array_equal(moved.get(), mine.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("first", [1.0, math.nan])
def test_clipping_does_not_wait(cupy: Any, waits: list[str], norm_type: float, max_norm: float, first: float) -> None:
    rng = np.random.default_rng(3)
    here = [nn.Parameter(np.zeros(n, np.float32)) for n in (3, 0, 20)]
    for p in here:
        p.grad = rng.standard_normal(p.shape).astype(np.float32)
    here[0].grad[0] = first
    there = [nn.Parameter(cupy.asarray(p.data)) for p in here]
    for p, q in zip(here, there, strict=True):
        q.grad = cupy.asarray(p.grad)
    total = nn.utils.clip_grad_norm_(there, max_norm, norm_type)
    assert waits == []
    assert float(total) == pytest.approx(nn.utils.clip_grad_norm_(here, max_norm, norm_type), nan_ok=True)
    for p, q in zip(here, there, strict=True):
        np.testing.assert_allclose(q.grad.get(), p.grad, rtol=1e-6)


@pytest.mark.parametrize("wrong", [5, -1, 1 << 40])
def test_a_target_that_is_no_class_spoils_the_loss(cupy: Any, wrong: int) -> None:
    scores = Tensor(cupy.zeros((3, 5), np.float32), requires_grad=True)
    loss = F.cross_entropy(scores, cupy.asarray(np.array([1, wrong, 2])))
    loss.backward()
    assert math.isnan(loss.item())
    found = scores.grad.get()
    assert np.isfinite(found[[0, 2]]).all() and np.isnan(found[1]).any()


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_dropout_is_drawn_on_the_device(cupy: Any, waits: list[str], p: float) -> None:
    nn.manual_seed(4)
    x = cupy.ones((300, 70), np.float32)
    mask = keep_mask(x, p)
    other = keep_mask(x, p)
    nn.manual_seed(4)
    again = keep_mask(x.T.copy().T, p)  # another order of memory
    assert waits == []
    values = mask.get()
    assert np.array_equal(values, again.get())
    assert set(np.unique(values)) <= {0, np.float32(1 / (1 - p) if p < 1 else 0)}
    share = (values == 0).mean()
    assert share == (1 if p == 1 else 0 if p == 0 else pytest.approx(p, abs=0.015))  # 4 standard deviations
    if 0 < p < 1:
        assert 0.4 < 0.5 * ((values == 0) == (other.get() == 0)).mean() + 0.25 < 0.6
        rows = (values == 0).mean(axis=1)
        assert abs(rows.std() - math.sqrt(p * (1 - p) / 70)) < 0.01


def test_scrambled_bits_are_even_and_without_neighbours(cupy: Any) -> None:
    bits = scrambled(np, 1 << 16, 1, 2)
    ones = (bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert abs(ones.mean(axis=0) - 0.5).max() < 0.01
    assert abs(np.corrcoef(ones.T) - np.eye(32)).max() < 0.02
    assert abs(np.corrcoef(bits[:-1], bits[1:])[0, 1]) < 0.02
    assert np.array_equal(scrambled(cupy, 1000, 1, 2).get(), scrambled(np, 1000, 1, 2))
    assert (scrambled(np, 1000, 1, 3) != scrambled(np, 1000, 1, 2)).mean() > 0.99


def test_text_of_a_tensor_on_a_device(cupy: Any) -> None:
    assert repr(Tensor(cupy.ones(2, np.float32))) == "Tensor([1., 1.])"
    x = Tensor(cupy.ones(3, np.float32), requires_grad=True)
    x.backward(np.array([1, 2, 3], np.float32))
    assert x.grad.get().tolist() == [1, 2, 3]

"""Half precision: layers in it, float32 master weights, and the scale of the loss."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mpiddp
import mpiddp.nn.functional as F  # noqa: N812
from mpiddp import nn, optim
from mpiddp.autograd import Tensor, gradcheck
from mpiddp.autograd.arithmetic import product, total

ml_dtypes = pytest.importorskip("ml_dtypes")
HALVES = pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)


@HALVES
@pytest.mark.parametrize(
    "shapes", [((3, 300), (300, 4)), ((2, 3, 5), (5, 4)), ((2, 1, 3, 5), (7, 5, 2)), ((5,), (5, 2))]
)
def test_product_is_float32s_rounded_once(dtype: Any, shapes: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    exact = a.astype(np.float32) @ b.astype(np.float32)
    assert product(a, b).dtype == dtype
    assert np.array_equal(product(a, b), exact.astype(dtype))
    out = np.empty(exact.shape, dtype)
    assert product(a, b, out=out) is out and np.array_equal(out, exact.astype(dtype))
    assert product(a, b.astype(np.float32)).dtype == np.float32


def test_product_of_short_integers_stays_exact() -> None:
    a = np.array([[30_001, 1]], np.int16)
    assert np.array_equal(product(a, a.T), a @ a.T)


@HALVES
def test_total_does_not_stop_growing(dtype: Any) -> None:
    assert total(np.ones((5000, 1), dtype), axis=0) == 5000
    assert total(np.ones((3, 2)), axis=0).dtype == np.float64


MANY: list[tuple[str, tuple[Any, ...], tuple[int, ...], float]] = [
    ("adaptive_avg_pool2d", (1,), (2, 3, 40, 40), 1),
    ("layer_norm", ((1024,),), (3, 1024), 1),
    ("layer_norm", ((64,),), (3, 64), 500),
    ("batch_norm", (None, None, None, None, True), (1024, 3), 1),
    ("softmax", (1,), (3, 1024), 1),
    ("add", (), (1, 3), 1),
    ("expand", (1024, 3), (1, 3), 1),
    ("embedding", (), (2, 3), 1),
    ("index", (), (2, 3), 1),
]


@HALVES
@pytest.mark.parametrize(("name", "args", "shape", "scale"), MANY, ids=[f"{c[0]}{c[1]}{c[3]}" for c in MANY])
def test_many_numbers_are_added_up_in_single(
    name: str, args: tuple[Any, ...], shape: tuple[int, ...], scale: float, dtype: Any
) -> None:
    """In bfloat16 256 + 1 is 256, and in float16 the square of 256 infinite."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data = (scale * rng.normal(1, 1, shape)).astype(dtype)
    rows = np.arange(1024) % 2
    ours, theirs = Tensor(data, requires_grad=True), torch.tensor(data.astype(np.float32), requires_grad=True)
    if name == "add":
        found, expected = ours + np.zeros((1024, 3), dtype), theirs + torch.zeros(1024, 3)
    elif name == "expand":
        found, expected = ours.expand(*args), theirs.expand(*args)
    elif name == "index":
        found, expected = ours[rows], theirs[torch.from_numpy(rows)]
    elif name == "embedding":
        found, expected = F.embedding(rows, ours), torch.nn.functional.embedding(torch.from_numpy(rows), theirs)
    else:
        found, expected = getattr(F, name)(ours, *args), getattr(torch.nn.functional, name)(theirs, *args)
    weights = rng.normal(1, 1, found.shape).astype(dtype)
    found.backward(weights)
    expected.backward(torch.tensor(weights.astype(np.float32)))
    assert found.dtype == ours.grad.dtype == dtype
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    for one, other in ((found.data, expected.detach()), (ours.grad, theirs.grad)):
        largest = float(other.abs().max())
        np.testing.assert_allclose(one.astype(np.float32), other.numpy(), rtol=epsilon, atol=epsilon * largest)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.batch = nn.BatchNorm2d(3)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.table.weight  # shared, in half here and in single there
        self.seen: dict[str, np.dtype[Any]] = {}

    def forward(self, x: Any) -> Tensor:
        x = self.norm(self.table(x))  # (N, T, 6)
        x = x + self.attend(x, x, x, need_weights=False, is_causal=True)[0]
        y = self.batch(self.conv(x.unsqueeze(1)))  # (N, 3, T, 6)
        for name, value in (("attend", x), ("norm", self.norm(x)), ("conv", self.conv(x.unsqueeze(1))), ("batch", y)):
            self.seen[name] = value.dtype
        return self.head(F.gelu(y.mean(1)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    tokens = np.random.default_rng(0).integers(0, 5, (4, 7))
    return F.cross_entropy(model(tokens).to(np.float32).reshape(-1, 5), tokens.ravel())


@HALVES
def test_gradients_are_float32s_to_half_precision(dtype: Any) -> None:
    nn.manual_seed(0)
    model = Everything()
    expected = loss_of(model)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    largest = max(np.linalg.norm(grad) for grad in gradients.values())
    model.zero_grad()
    precision = nn.MixedPrecision(model, dtype)
    before = {name: p.data.copy() for name, p in model.named_parameters()}
    with precision.autocast():
        assert model.conv.weight.dtype == dtype
        loss = loss_of(model)
    loss.backward()
    assert model.seen["conv"] == dtype and model.seen["norm"] == model.seen["batch"] == np.float32
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    assert 0 < abs(loss.item() - expected.item()) < 4 * epsilon * expected.item()
    for name, p in model.named_parameters():
        assert p.dtype == p.grad.dtype == np.float32 and np.array_equal(p.data, before[name])
        # A bias before batch norm has no gradient but rounding, so: or small against the others.
        bound = 12 * epsilon * max(np.linalg.norm(gradients[name]), 0.1 * largest)
        assert 0 < np.linalg.norm(p.grad - gradients[name]) < bound, name


@HALVES
def test_against_torchs_autocast(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    theirs = getattr(torch, str(dtype))
    nn.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
    others = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
    others.load_state_dict({name: torch.tensor(x) for name, x in layers.state_dict().items()})
    x = np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32)
    with nn.MixedPrecision(layers, dtype).autocast():
        out = layers(x)
    with torch.autocast("cpu", dtype=theirs):
        expected = others(torch.from_numpy(x))
    assert str(expected.dtype) == f"torch.{out.dtype}"
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        out.data.astype(float), expected.detach().double().numpy(), rtol=2 * epsilon, atol=epsilon
    )
    out.to(np.float32).sum().backward()
    expected.float().sum().backward()
    for (name, p), q in zip(layers.named_parameters(), others.parameters(), strict=True):
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=0.1, atol=8 * epsilon, err_msg=name)


@HALVES
def test_arguments_by_name_are_cast_too(dtype: Any) -> None:
    nn.manual_seed(0)
    model = nn.ModuleDict({"attend": nn.MultiheadAttention(4, 2), "norm": nn.LayerNorm(4)})
    x = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    with nn.MixedPrecision(model, dtype).autocast():
        expected = model["attend"](x, x, x, need_weights=False)[0]
        found = model["attend"](query=x, key=x, value=x, need_weights=False)[0]
        assert model["norm"](input=found).dtype == np.float32
    assert found.dtype == dtype and np.array_equal(found.data, expected.data)


def test_outside_of_the_block_and_after_an_error_the_model_is_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    precision = nn.MixedPrecision(model, np.float16)
    x = np.ones((2, 2), np.float32)
    assert model(x).dtype == np.float32
    with pytest.raises(RuntimeError), precision.autocast():
        model(np.ones((2, 3), np.float32))
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    assert model(x).dtype == np.float32


@HALVES
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "gelu"])
def test_functions_compute_in_float32(dtype: Any, name: str) -> None:
    x = (np.random.default_rng(0).standard_normal((3, 2000)) * 3).astype(dtype)
    options = {"dim": 1} if "softmax" in name else {}
    half, single = getattr(F, name)(x, **options), getattr(F, name)(x.astype(np.float32), **options)
    assert half.dtype == dtype
    assert np.array_equal(half.data, single.data.astype(dtype))


def test_a_cast_on_the_tape_has_the_right_gradient() -> None:
    (x,) = [np.random.default_rng(0).standard_normal((3, 2))]
    assert gradcheck(lambda x: x.to(np.float64) * 2, [x])


def test_small_gradients_vanish_without_a_scale_and_not_with_one() -> None:
    weight = nn.Linear(1, 1, bias=False)
    precision = nn.MixedPrecision(weight, np.float16)
    x = np.ones((1, 1), np.float32)
    with precision.autocast():
        small = weight(x).to(np.float32) * 1e-9
    small.backward(np.ones((1, 1), np.float32))
    assert weight.weight.grad == 0
    weight.zero_grad()
    with precision.autocast():
        small = weight(x).to(np.float32) * 1e-9
    small.backward(np.full((1, 1), 65536, np.float32))
    np.testing.assert_allclose(weight.weight.grad / 65536, 1e-9, rtol=1e-3)


def test_scaler_follows_torchs() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=3)
    ours = nn.LossScale(32.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflow in np.random.default_rng(0).random(40) < 0.2:
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(bool(overflow))
        assert ours.scale == theirs.get_scale()


def test_scaler_goes_on_from_its_state() -> None:
    first = nn.LossScale(8.0, growth_interval=3)
    first.update(True)
    first.update(False)
    first.update(False)
    second = nn.LossScale(growth_interval=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(False)
    assert second.scale == 8.0


@pytest.mark.parametrize(
    "options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"init_scale": 0.0}, {"growth_interval": 0}], ids=str
)
def test_scaler_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss scale needs"):
        nn.LossScale(**options)


@pytest.mark.parametrize(("init_scale", "least"), [(4.0, 1.0), (3.0, 1.0), (0.25, 0.25)])
def test_scaler_comes_down_to_its_limit_and_then_says_so(init_scale: float, least: float) -> None:
    scaler = nn.LossScale(init_scale, growth_interval=2)
    for _ in range(20):
        if scaler.scale == least:
            break
        scaler.update(True)
    for _ in range(3):
        with pytest.raises(
            FloatingPointError, match=f"not finite with a scale of {least:g}, and a smaller one does not"
        ):
            scaler.update(True)
        assert scaler.scale == least
    scaler.update(False)
    with pytest.raises(FloatingPointError):
        scaler.update(True)
    for _ in range(2):
        assert scaler.scale == least, "only steps in a row are many"
        scaler.update(False)
    assert scaler.scale == 2 * least


def scale_and_step(framework: Any, scaler: Any, values: Any, steps: int) -> list[tuple[list[float], float]]:
    """Train two parameters with a scaler; the gradient of each step is in ``values``, before scaling."""
    torch_like = framework.__name__ == "torch"
    tensor: Any = framework.tensor if torch_like else Tensor
    p = framework.nn.Parameter(tensor(np.ones(2, np.float32)))
    optimizer = framework.optim.SGD([p], lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        with np.errstate(over="ignore", invalid="ignore"):
            scaler.scale((p * tensor(values[step])).sum()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                framework.nn.utils.clip_grad_norm_([p], 1.0)
            scaler.step(optimizer)
        scaler.update()
        seen.append((p.detach().numpy().tolist(), scaler.get_scale()))
    return seen


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_scaler_is_torchs(enabled: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(30, 2)).astype(np.float32)
    if enabled:
        values[rng.random(30) < 0.2] = 3e38  # overflows when it is scaled
    options: dict[str, Any] = {"init_scale": 32.0, "growth_interval": 3, "enabled": enabled}
    ours, theirs = nn.GradScaler("cpu", **options), torch.amp.GradScaler("cpu", **options)
    for (mine, scale), (other, expected) in zip(
        scale_and_step(mpiddp, ours, values, 30), scale_and_step(torch, theirs, values, 30), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
        assert scale == expected
    assert ours.is_enabled() == theirs.is_enabled() == enabled


def test_grad_scaler_refuses_what_torchs_refuses() -> None:
    scaler, p = nn.GradScaler(), nn.Parameter(np.ones(2, np.float32))
    sgd = mpiddp.optim.SGD([p], lr=0.1)
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        scaler.update()
    p.grad = np.ones(2, np.float32)
    scaler.unscale_(sgd)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(sgd)
    scaler.step(sgd)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(sgd)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(sgd)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(sgd, closure=lambda: None)
    scaler.update(new_scale=4.0)
    again = nn.GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 4.0 and nn.GradScaler(enabled=False).state_dict() == {}
    losses = scaler.scale([Tensor([1.0]), Tensor([2.0])])
    assert [loss.item() for loss in losses] == [4.0, 8.0]


def test_one_context_serves_many_steps():
    layer = nn.Linear(2, 3)
    context = nn.MixedPrecision(layer, np.float16).autocast()
    for _ in range(2):
        with context:
            assert layer(np.ones((4, 2), np.float32)).dtype == np.float16
        assert layer(np.ones((4, 2), np.float32)).dtype == np.float32


LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")


@HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_float32_under_autocast_as_torch_s(dtype: Any, name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    scores = (rng.standard_normal((50, 3)) * 9).astype(dtype)
    classes = name in LOSSES[:2]
    target = rng.integers(0, 3, 50) if classes else rng.random((50, 3), np.float32)
    x = Tensor(scores, requires_grad=True)
    with nn.MixedPrecision(nn.Linear(1, 1), dtype).autocast():
        loss = getattr(F, name)(x, target)
    loss.backward()
    kind = getattr(torch, dtype.name)
    theirs = torch.tensor(scores.astype(np.float32)).to(kind).requires_grad_()
    with torch.autocast("cpu", kind):
        expected = getattr(torch.nn.functional, name)(theirs, torch.tensor(target))
    expected.backward()
    assert loss.dtype == np.float32 and expected.dtype == torch.float32 and x.grad.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert np.allclose(x.grad.astype(np.float32), theirs.grad.float().numpy(), rtol=0.01, atol=1e-6)


def test_first_step_with_a_scaled_loss_under_autocast_does_not_overflow() -> None:
    layer, scaler = nn.Linear(4, 3), nn.GradScaler()
    sgd = optim.SGD(layer.parameters(), lr=0.1)
    with nn.MixedPrecision(layer, np.float16).autocast():
        loss = F.cross_entropy(layer(np.ones((2, 4), np.float32)), np.array([0, 1]))
    scaler.scale(loss).backward()
    before = layer.weight.data.copy()
    scaler.step(sgd)
    assert not np.array_equal(layer.weight.data, before)

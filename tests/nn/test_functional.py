"""Functions of networks against central differences in float64, and against torch if installed."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp import nn
from mpiddp.autograd import Tensor, gradcheck
from mpiddp.nn import conv
from mpiddp.nn.activation import erf
from mpiddp.nn.window import Window


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def compare(function: Callable[..., Any], torch_function: Callable[..., Any], inputs: list[Any], dtype: str) -> None:
    """Assert equal values and gradients; inputs of floating point are differentiated, others passed on."""
    torch = pytest.importorskip("torch")
    ours, theirs = [], []
    for value in inputs:
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            ours.append(Tensor(value.astype(dtype), requires_grad=True))
            theirs.append(torch.tensor(value.astype(dtype), requires_grad=True))
        else:
            ours.append(value)
            theirs.append(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
    out, expected = function(*ours), torch_function(*theirs)
    assert out.shape == tuple(expected.shape) and out.dtype == dtype
    weights = np.asarray(np.random.default_rng(1).normal(size=out.shape), dtype)
    out.backward(weights)
    expected.backward(torch.from_numpy(weights))
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(out.data, expected.detach().numpy(), rtol=tolerance, atol=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Tensor):
            assert mine.grad is not None and mine.grad.dtype == dtype and mine.grad.flags.c_contiguous
            np.testing.assert_allclose(mine.grad, other.grad.numpy(), rtol=tolerance, atol=tolerance)


DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])

SIMPLE: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("relu", {}, (3, 4)),
    ("tanh", {}, (3, 4)),
    ("sigmoid", {}, (3, 4)),
    ("gelu", {}, (3, 40)),
    ("gelu", {"approximate": "tanh"}, (3, 40)),
    ("silu", {}, (3, 4)),
    ("logsigmoid", {}, (3, 4)),
    ("softmax", {"dim": 1}, (3, 4)),
    ("softmax", {"dim": 0}, (3, 4, 2)),
    ("log_softmax", {"dim": -1}, (3, 4, 2)),
    ("log_softmax", {"dim": 1}, (3, 4)),
    ("layer_norm", {"normalized_shape": (4, 2)}, (3, 4, 2)),
    ("max_pool2d", {"kernel_size": 2}, (2, 3, 6, 4)),
    ("max_pool2d", {"kernel_size": 2}, (2, 3, 7, 5)),
    ("max_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, (2, 3, 7, 6)),
    ("max_pool2d", {"kernel_size": (1, 3), "stride": (2, 1)}, (1, 2, 5, 6)),
    ("max_pool2d", {"kernel_size": 2, "stride": 3}, (1, 2, 8, 7)),
    ("max_pool2d", {"kernel_size": 2}, (3, 6, 4)),
    ("adaptive_avg_pool2d", {"output_size": 1}, (2, 3, 7, 6)),
    ("adaptive_avg_pool2d", {"output_size": (2, 3)}, (2, 3, 7, 5)),
    ("adaptive_avg_pool2d", {"output_size": (None, 2)}, (2, 3, 3, 5)),
    ("pad", {"pad": (1, 2, 0, 3), "value": 1.5}, (2, 3, 4)),
    ("pad", {"pad": (-1, 2)}, (2, 4)),
]
IDS = [f"{name}{options}" for name, options, _ in SIMPLE]


@pytest.mark.parametrize(("name", "options", "shape"), SIMPLE, ids=IDS)
def test_central_differences(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    # Distinct values, none near 0 and none near another: the largest stays the largest.
    values = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / np.prod(shape) * 4 - 2.003
    assert gradcheck(lambda x: getattr(F, name)(x, **options), [values])


@DTYPES
@pytest.mark.parametrize(("name", "options", "shape"), SIMPLE, ids=IDS)
def test_torch(name: str, options: dict[str, Any], shape: tuple[int, ...], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = options
    if name == "pad":
        theirs = {"mode": "constant", "value": 0.0, **options}
    function = torch.tanh if name == "tanh" else getattr(torch.nn.functional, name)
    compare(lambda x: getattr(F, name)(x, **options), lambda x: function(x, **theirs), draw(shape), dtype)


def test_erf_is_exact_to_the_dtype() -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, -0.0, 1e-9, 40.0, -40.0]])
    exact = np.array([math.erf(v) for v in x])
    # The coefficients come from a least-squares fit, whose last bits are the BLAS kernel's, and so the processor's.
    np.testing.assert_allclose(erf(x), exact, rtol=0, atol=4e-15)
    np.testing.assert_allclose(erf(x.astype(np.float32)), exact, rtol=0, atol=3e-7)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 3), (3,), (2, 4, 3), (0, 3), (1, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    inputs = draw(shape, (2, 3), (2,))[: 3 if bias else 2]
    compare(F.linear, torch.nn.functional.linear, inputs, dtype)
    if dtype == "float64" and shape[0]:
        assert gradcheck(F.linear, inputs)


CONVOLUTIONS = [
    # input, weight, stride, padding, dilation, groups
    ((2, 3, 6, 5), (4, 3, 3, 3), 1, 0, 1, 1),
    ((2, 1, 7, 6), (3, 1, 5, 5), 1, 0, 1, 1),
    ((3, 4, 7, 5), (6, 2, 3, 2), (2, 1), (1, 2), 1, 2),
    ((1, 4, 6, 6), (4, 1, 3, 3), 1, 1, 1, 4),
    ((2, 4, 6, 6), (8, 1, 3, 3), 2, 1, 1, 4),
    ((2, 2, 9, 8), (3, 2, 3, 2), (2, 3), 2, (2, 3), 1),
    ((2, 5, 4, 4), (3, 5, 1, 1), 1, 0, 1, 1),
    ((2, 3, 4, 4), (2, 3, 4, 4), 1, 0, 1, 1),
    ((3, 6, 5), (4, 3, 3, 3), 1, 1, 1, 1),
]


@DTYPES
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_conv2d_torch(case: tuple[Any, ...], bias: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    image, kernel, *options = case
    inputs = draw(image, kernel, (kernel[0],)) if bias else [*draw(image, kernel), None]
    compare(F.conv2d, torch.nn.functional.conv2d, [*inputs, *options], dtype)


LIMITS = [(0, 0, 1), (0, 10**9, 1), (10**9, 600, 1), (3000, 600, 2), (3000, 0, 1)]


@pytest.mark.parametrize(("cache", "unpacked", "least"), LIMITS)
def test_conv2d_is_the_same_in_blocks(cache: int, unpacked: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, parts = set(), set()
    whole = conv.Columns.gather

    def gather(self: conv.Columns, image: Any, seen: slice) -> Any:
        block = whole(self, image, seen)
        rows.add(seen.stop - seen.start)
        parts.add(block.shape[1])
        return block

    for image, kernel, *options in CONVOLUTIONS[:8]:
        inputs = [Tensor(each, requires_grad=True) for each in draw((5, *image[1:]), kernel, kernel[:1])]
        results = []
        for limits in ((10**9, 0, 1), (cache, unpacked, least)):
            for name, limit in zip(("_CACHE_BYTES", "_UNPACKED", "_LEAST_COLUMNS"), limits, strict=True):
                monkeypatch.setattr(conv, name, limit)
            y = F.conv2d(*inputs, *options)
            (y * y).sum().backward()
            results.append([y.data, *(each.grad for each in inputs)])
            for each in inputs:
                each.grad = None
            monkeypatch.setattr(conv.Columns, "gather", gather)
        monkeypatch.setattr(conv.Columns, "gather", whole)
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert (rows == {1}) == (cache == 0) and (len(parts) > 1) == (unpacked == 600)


def test_conv2d_of_many_images_is_cut() -> None:
    torch = pytest.importorskip("torch")
    compare(F.conv2d, torch.nn.functional.conv2d, [*draw((48, 6, 17, 16), (20, 6, 5, 5)), None], "float64")
    cut = conv.Columns(Window((17, 16), (5, 5), (1, 1), (0, 0), (1, 1)), np.zeros((6, 17, 16, 48)), 1, 20)
    assert len(list(cut.blocks())) > 1 and cut.gather(np.zeros((6, 17, 16, 48)), slice(0, 1)).shape[1] > 1


@pytest.mark.parametrize("case", CONVOLUTIONS[1:6], ids=str)
def test_conv2d_central_differences(case: tuple[Any, ...]) -> None:
    image, kernel, *options = case
    assert gradcheck(lambda x, w, b: F.conv2d(x, w, b, *options), draw(image, kernel, (kernel[0],)))


def test_empty_batch_goes_through_a_network() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout2d(), nn.Flatten(), nn.Linear(27, 4), nn.LogSoftmax(1)
    )
    out = model(np.zeros((0, 1, 8, 8), np.float32))
    assert out.shape == (0, 4)
    F.nll_loss(out, np.zeros(0, np.int64), reduction="sum").backward()
    assert all(np.all(p.grad == 0) for p in model.parameters())


@pytest.mark.parametrize("layout", list(itertools.permutations(range(4))), ids=str)
def test_memory_order_of_images_does_not_matter(layout: tuple[int, ...]) -> None:
    x, w = (array.astype(np.float32) for array in draw((3, 2, 6, 4), (5, 2, 3, 3)))
    inverse = tuple(np.argsort(layout))
    turned = np.ascontiguousarray(x.transpose(layout)).transpose(inverse)
    outputs, gradients = [], []
    for data in (x, turned):
        image = Tensor(data, requires_grad=True)
        y = F.max_pool2d(F.relu(F.conv2d(image, w, padding=1)), 2)
        (F.adaptive_avg_pool2d(y, 2) * y[:, :, 1:, 1:]).sum().backward()
        outputs.append(y.data)
        gradients.append(image.grad)
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_images_lie_with_the_batch_innermost() -> None:
    y = F.relu(F.max_pool2d(F.conv2d(draw((3, 2, 6, 6))[0], draw((4, 2, 3, 3))[0]), 2))
    assert y.shape == (3, 4, 2, 2)
    assert y.data.transpose(1, 2, 3, 0).flags.c_contiguous
    assert np.shares_memory(y.flatten(1).data, y.data)


def test_max_pool_gives_a_tie_to_the_first() -> None:
    torch = pytest.importorskip("torch")
    compare(
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: torch.nn.functional.max_pool2d(x, 3, 1, 1),
        [np.random.default_rng(0).integers(0, 3, (2, 2, 6, 6)).astype(float)],
        "float64",
    )


def test_max_pool_of_many_positions_keeps_one_number_a_window() -> None:
    torch = pytest.importorskip("torch")
    x = draw((1, 2, 40, 40))[0]
    compare(lambda x: F.max_pool2d(x, 17), lambda x: torch.nn.functional.max_pool2d(x, 17), [x], "float64")
    image = nn.Parameter(x)
    tracemalloc.start()
    try:
        y = F.max_pool2d(image, 15, 1)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1.5 * y.data.nbytes  # with a boolean for each position it would be 225 bytes a window


def test_gradients_are_born_in_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 2, bias=False))
    flat = np.full(sum(p.size for p in model.parameters()), np.nan, np.float32)
    start = 0
    for p in model.parameters():
        p.grad_slot = flat[start : start + p.size].reshape(p.shape)
        start += p.size
    copied = []
    monkeypatch.setattr("numpy.copyto", lambda *args, **kwargs: copied.append(args))
    x = draw((4, 2, 6, 6))[0].astype(np.float32)
    model(x).sum().backward()
    assert not copied and not np.isnan(flat).any()
    assert all(p.grad is p.grad_slot and np.shares_memory(p.grad, flat) for p in model.parameters())
    once = flat.copy()
    model(x).sum().backward()
    np.testing.assert_allclose(flat, 2 * once, rtol=1e-5, atol=1e-6)


def test_shared_weight_in_a_slot() -> None:
    layer = nn.Linear(3, 3)
    slots = [np.full_like(p.data, np.nan) for p in layer.parameters()]
    x = draw((4, 3))[0].astype(np.float32)
    layer(layer(x).tanh()).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    for p, slot in zip(layer.parameters(), slots, strict=True):
        p.grad, p.grad_slot = None, slot
    layer(layer(x).tanh()).sum().backward()
    for p, slot, value in zip(layer.parameters(), slots, expected, strict=True):
        assert p.grad is slot
        np.testing.assert_allclose(slot, value, rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx: int | None, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    index = np.array([[0, 2, 2], [4, 0, 2]])
    compare(
        lambda w: F.embedding(index, w, padding_idx),
        lambda w: torch.nn.functional.embedding(torch.from_numpy(index), w, padding_idx),
        draw((5, 3)),
        dtype,
    )


def test_embedding_into_a_slot() -> None:
    layer = nn.Embedding(4, 2)
    layer.weight.grad_slot = np.full((4, 2), np.nan, np.float32)
    layer(np.array([1, 1, 3])).sum().backward()
    assert layer.weight.grad is layer.weight.grad_slot
    np.testing.assert_array_equal(layer.weight.grad, [[0, 0], [2, 2], [0, 0], [1, 1]])


@DTYPES
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(shape: tuple[int, ...], training: bool, affine: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    mean, var = np.array([0.5, -1, 2], dtype), np.array([1.5, 0.7, 2], dtype)
    theirs = torch.tensor(mean), torch.tensor(var)
    inputs = draw(shape, (3,), (3,)) if affine else draw(shape)
    compare(
        lambda x, w=None, b=None: F.batch_norm(x, mean, var, w, b, training, 0.2, 1e-4),
        lambda x, w=None, b=None: torch.nn.functional.batch_norm(x, *theirs, w, b, training, 0.2, 1e-4),
        inputs,
        dtype,
    )
    np.testing.assert_allclose(mean, theirs[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(var, theirs[1].numpy(), rtol=1e-5)
    assert gradcheck(lambda x, *wb: F.batch_norm(x, mean.copy(), var.copy(), *(wb or (None, None)), training), inputs)


@DTYPES
def test_layer_norm(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    inputs = draw((2, 5, 4), (4,), (4,))
    compare(
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        lambda x, w, b: torch.nn.functional.layer_norm(x, (4,), w, b),
        inputs,
        dtype,
    )
    assert gradcheck(lambda x, w, b: F.layer_norm(x, (4,), w, b), inputs)


TARGETS = {
    (5, 4): np.array([0, 3, -100, 1, 1]),
    (2, 4, 3): np.array([[0, 3, -100], [1, 1, 2]]),
    (4,): np.array(2),
}
LOSS_CASES = list(itertools.product(TARGETS, ["mean", "sum", "none"], [False, True], [0.0, 0.1]))


@DTYPES
@pytest.mark.parametrize(("shape", "reduction", "weighted", "smoothing"), LOSS_CASES)
def test_cross_entropy(shape: tuple[int, ...], reduction: str, weighted: bool, smoothing: float, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    target = TARGETS[shape]
    weight = np.array([0.5, 1, 2, 3], dtype) if weighted else None
    theirs = torch.from_numpy(weight) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(
        lambda x: F.cross_entropy(x, target, weight, **options),
        lambda x: torch.nn.functional.cross_entropy(x, torch.from_numpy(target), theirs, **options),
        draw(shape),
        dtype,
    )
    if smoothing == 0:
        compare(
            lambda x: F.nll_loss(x, target, weight, reduction=reduction),
            lambda x: torch.nn.functional.nll_loss(x, torch.from_numpy(target), theirs, reduction=reduction),
            draw(shape),
            dtype,
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3)])
def test_cross_entropy_of_probabilities(shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    torch = pytest.importorskip("torch")
    target = np.random.default_rng(3).dirichlet(np.ones(4), (shape[0], *shape[2:]))
    target = np.moveaxis(target, -1, 1)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(
        lambda x: F.cross_entropy(x, target, **options),
        lambda x: torch.nn.functional.cross_entropy(x, torch.from_numpy(target), **options),
        draw(shape),
        "float64",
    )


DISTANCES = [
    ("mse_loss", {}),
]


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "options"), DISTANCES, ids=str)
def test_losses_of_values(name: str, options: dict[str, Any], reduction: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    a, b = draw((3, 4), (3, 4))
    b[0, 0] = a[0, 0]
    compare(
        lambda a, b: getattr(F, name)(a, b, reduction=reduction, **options),
        lambda a, b: getattr(torch.nn.functional, name)(a, b, reduction=reduction, **options),
        [a, b],
        dtype,
    )


def test_losses_of_values_warn_of_other_shapes_as_torchs() -> None:
    """(N, 1) less (N) is (N, N): a regression that learns the mean, without an error."""
    torch = pytest.importorskip("torch")
    a, b = draw((3, 1), (3,))
    with pytest.warns(UserWarning, match="Using a target size") as ours:
        loss = F.mse_loss(a, b)
    assert ours[0].filename == __file__
    with pytest.warns(UserWarning, match="Using a target size"):
        expected = torch.nn.functional.mse_loss(torch.from_numpy(a), torch.from_numpy(b))
    assert loss.item() == pytest.approx(expected.item())


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("positive", [False, True])
def test_binary_cross_entropy(reduction: str, weighted: bool, positive: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x, target = draw((5, 3))[0] * 20, np.random.default_rng(2).uniform(size=(5, 3))
    target[0] = [0, 1, 1]
    weight = np.array([0.5, 1, 2], dtype) if weighted else None
    pos_weight = np.array([3, 1, 0.1], dtype) if positive else None
    compare(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight, reduction=reduction, pos_weight=pos_weight),
        lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(
            x,
            y,
            None if weight is None else torch.from_numpy(weight),
            reduction=reduction,
            pos_weight=None if pos_weight is None else torch.from_numpy(pos_weight),
        ),
        [x, target],
        dtype,
    )


def test_binary_cross_entropy_does_not_overflow() -> None:
    x = Tensor(np.array([1e4, -1e4, 1e4, -1e4], np.float32), requires_grad=True)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = F.binary_cross_entropy_with_logits(x, np.array([1, 0, 0, 1], np.float32), reduction="none")
        loss.sum().backward()
    assert loss.tolist() == [0, 0, 1e4, 1e4] and x.grad.tolist() == [0, 0, 1, -1]


@pytest.mark.filterwarnings("error")
def test_mean_of_no_sample_is_nan_without_a_warning() -> None:
    x = Tensor(np.zeros((0, 3), np.float32), requires_grad=True)
    loss = F.cross_entropy(x, np.zeros(0, np.int64))
    loss.backward()
    assert math.isnan(loss.item()) and x.grad is not None and x.grad.shape == (0, 3)
    for loss in (F.cross_entropy, F.mse_loss):
        assert math.isnan(loss(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).item())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, np.array([0.5, 1, 2])])
def test_batch_of_ignored_targets_has_no_gradient(weight: np.ndarray | None, smoothing: float) -> None:
    x = Tensor(draw((2, 3))[0], requires_grad=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = F.cross_entropy(x, np.array([-100, -100]), weight, label_smoothing=smoothing)
        loss.backward()
    assert math.isnan(loss.item())
    np.testing.assert_array_equal(x.grad, np.zeros((2, 3)))  # as torch's


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_keep_the_dtype_of_the_scores(smoothing: float) -> None:
    x = draw((5, 4))[0].astype(np.float32)
    for target in (TARGETS[5, 4], np.full((5, 4), 0.25)):
        loss = F.cross_entropy(x, target, weight=np.array([0.5, 1, 2, 3]), label_smoothing=smoothing)
        assert loss.dtype == np.float32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_many_samples_in_float16(smoothing: float, weighted: bool) -> None:
    """The sum of so many losses is no float16, and neither is their number."""
    torch = pytest.importorskip("torch")
    x = draw((70_000, 3))[0].astype(np.float16)
    labels = np.arange(len(x)) % 3
    weight = np.array([1, 2, 3], np.float16) if weighted else None
    ours, theirs = Tensor(x, requires_grad=True), torch.tensor(x.astype(np.float32), requires_grad=True)
    loss = F.cross_entropy(ours, labels, weight, label_smoothing=smoothing)
    expected = torch.nn.functional.cross_entropy(
        theirs,
        torch.from_numpy(labels),
        None if weight is None else torch.from_numpy(weight).float(),
        label_smoothing=smoothing,
    )
    loss.backward(np.float16(1024))
    expected.backward(torch.tensor(1024.0))
    assert loss.dtype == np.float16 and loss.item() == pytest.approx(expected.item(), rel=1e-3)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 3)])
def test_cross_entropy_of_floats_that_are_no_probabilities(shape: tuple[int, ...]) -> None:
    """Classes as floats would be spread over the scores, without a word if there are as many as classes."""
    with pytest.raises(ValueError, match=r"integer classes, or probabilities of shape \(3, 3\)"):
        F.cross_entropy(np.zeros((3, 3), np.float32), np.zeros(shape, np.float32))


def test_cross_entropy_does_not_overflow() -> None:
    x = Tensor(np.array([[1000.0, 0.0], [-1000.0, 1000.0]], np.float32), requires_grad=True)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = F.cross_entropy(x, np.array([0, 0]))
        loss.backward()
    assert loss.item() == 1000.0
    np.testing.assert_allclose(x.grad, [[0, 0], [-0.5, 0.5]])


def test_errors() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        F.nll_loss(x, np.array([0, 3]))
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        F.nll_loss(x, np.array([0, -1]))
    with pytest.raises(ValueError, match="to match target batch_size"):
        F.nll_loss(x, np.array([0, 1, 2]))
    with pytest.raises(TypeError, match="expected integer classes"):
        F.nll_loss(x, np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match="is not a valid value for reduction"):
        F.mse_loss(x, x, reduction="average")
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x5\)"):
        F.linear(x, np.zeros((5, 4), np.float32))
    with pytest.raises(RuntimeError, match=r"expected input\[1, 2, 5, 5\] to have 3 channels, but got 2"):
        F.conv2d(np.zeros((1, 2, 5, 5)), np.zeros((4, 3, 3, 3)))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        F.conv2d(np.zeros((1, 3, 2, 5)), np.zeros((4, 3, 3, 3)))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm(np.zeros((1, 3)), None, None, training=True)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        F.dropout(x, 1.5)
    with pytest.raises(IndexError, match="index out of range"):
        F.embedding(np.array([3]), np.zeros((3, 2)))
    with pytest.raises(ValueError, match="must be the same as input size"):
        F.binary_cross_entropy_with_logits(x, x[:, 0])
    with pytest.raises(RuntimeError, match="either none or tanh"):
        F.gelu(x, "exact")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8"])
def test_layers_refuse_inputs_of_another_dtype(dtype: str) -> None:
    """torch refuses them too; NumPy would go on in float64, twice as slow, through the whole network."""
    attention = nn.MultiheadAttention(3, 1)
    x = np.ones((2, 3, 3), dtype)
    for name, call in (
        ("linear", lambda: nn.Linear(3, 2)(x)),
        ("conv2d", lambda: nn.Conv2d(2, 1, 2)(x)),
        ("linear", lambda: attention(x, x, x)),
    ):
        wanted = rf"{name} needs input and weight of one dtype, got {dtype} and float32: .*x\.astype\('float32'\)"
        with pytest.raises(RuntimeError, match=wanted):
            call()
    assert nn.Linear(3, 2).to("float64")(x.astype(np.float64)).dtype == np.float64
    if np.dtype(dtype).kind != "f":
        with pytest.raises(RuntimeError, match=r"convert x\.astype\('float64'\)"):
            F.linear(x, np.ones((2, 3)))


def test_plain_arrays_and_tensors_alike() -> None:
    x, w, b = (array.astype(np.float32) for array in draw((4, 3), (2, 3), (2,)))
    np.testing.assert_array_equal(F.linear(x, w, b).data, F.linear(Tensor(x), Tensor(w), Tensor(b)).data)
    assert isinstance(F.relu(x), Tensor) and isinstance(F.dropout(x, training=False), Tensor)
    assert not F.linear(x, w, b).requires_grad
    np.testing.assert_array_equal(
        F.cross_entropy(x, np.array([0, 1, 2, 0])).data, F.cross_entropy(Tensor(x), Tensor(np.array([0, 1, 2, 0]))).data
    )


@pytest.mark.parametrize("kernel", [(3, 4), (2, 1), (5, 5)])
@pytest.mark.parametrize("dilation", [1, (2, 3)])
def test_conv2d_with_padding_in_words(kernel: tuple[int, int], dilation: Any) -> None:
    torch = pytest.importorskip("torch")
    inputs = draw((2, 3, 13, 14), (4, 3, *kernel), (4,))
    for padding in ("same", "valid"):
        compare(
            lambda *a, p=padding: F.conv2d(*a, padding=p, dilation=dilation),
            lambda *a, p=padding: torch.nn.functional.conv2d(*a, padding=p, dilation=dilation),
            inputs,
            "float64",
        )
    for framework in (nn, torch.nn):
        with pytest.raises(ValueError, match="strided"):
            framework.Conv2d(3, 4, 3, stride=2, padding="same")
        with pytest.raises(ValueError, match="Invalid padding string"):
            framework.Conv2d(3, 4, 3, padding="full")


NORMALIZATIONS: list[Callable[..., Tensor]] = [
    lambda x, weight, bias: F.layer_norm(x, (4,), weight, bias),
    lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
]


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_normalizations_refuse_other_dtypes(normalize: Callable[..., Tensor]) -> None:
    single, double, half = (np.ones(4, dtype) for dtype in ("float32", "float64", "float16"))
    x = draw((3, 4))[0]
    for parameters in ((double, single), (single, double), (None, double), (half, single)):
        cure = (
            r"float64: convert weight.astype\('float32'\)"
            if parameters[0] is not half
            else r"float16: convert x.astype"
        )
        with pytest.raises(RuntimeError, match="needs input and weight of one dtype, got float32 and " + cure):
            normalize(x.astype("float32"), *parameters)
    assert normalize(x, double, double).dtype == "float64"
    assert normalize(x.astype("float16"), single, single).shape == (3, 4)  # as torch's


def test_pad_knows_one_mode() -> None:
    with pytest.raises(NotImplementedError, match="'constant' only, got 'reflect'"):
        F.pad(np.zeros((2, 2)), (1, 1), "reflect")


def foreign(x: np.ndarray) -> Any:
    """Return what looks as torch's, which need not be installed."""
    names = ("shape", "dtype", "ndim", "size", "max", "reshape", "transpose", "__dlpack__", "__dlpack_device__")
    made = type("Tensor", (), {"__module__": "torch"})()
    for name in names:
        setattr(type(made), name, staticmethod(value) if callable(value := getattr(x, name)) else value)
    return made


TAKES_ARRAYS = {
    "linear": lambda x: F.linear(x, np.ones((2, 4), np.float32)),
    "relu": F.relu,
    "dropout": F.dropout,
    "cross_entropy": lambda x: F.cross_entropy(x, np.array([0, 1])),
    "mse_loss": lambda x: F.mse_loss(np.ones((2, 4), np.float32), x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "embedding": lambda x: F.embedding(x, np.ones((4, 2), np.float32)),
}


@pytest.mark.parametrize("name", TAKES_ARRAYS)
def test_other_libraries_arrays_are_refused_with_the_cure(name: str) -> None:
    x = foreign(np.ones((2, 4), np.float32))
    with pytest.raises(TypeError, match=r"got torch\.Tensor: pass x\.numpy\(\), or keep the model torch's"):
        TAKES_ARRAYS[name](x)
    type(x).__module__ = "jaxlib"
    with pytest.raises(TypeError, match=r"pass numpy\.asarray\(x\)$"):
        TAKES_ARRAYS[name](x)

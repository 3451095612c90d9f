"""Functions of networks against torch, and against central differences in float64."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.oracle import compare, draw

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp import nn
from mpiddp.autograd import Tensor, gradcheck
from mpiddp.device.packing import views

TIES = np.random.default_rng(0).integers(0, 3, (2, 2, 6, 6)).astype(float)
CONVOLUTIONS: list[tuple[Any, ...]] = [  # image, kernels, stride, padding
    ((2, 3, 6, 5), (4, 3, 3, 3), 1, 0),
    ((2, 1, 7, 6), (3, 1, 5, 5), 1, 0),
    ((3, 2, 7, 5), (6, 2, 3, 2), (2, 1), (1, 2)),
    ((2, 4, 6, 6), (8, 4, 3, 3), 2, 1),
    ((2, 2, 9, 8), (3, 2, 3, 2), (2, 3), 2),
    ((2, 5, 4, 4), (3, 5, 1, 1), 1, 0),
    ((2, 3, 4, 4), (2, 3, 4, 4), 1, 0),
]
LABELS: list[tuple[tuple[int, ...], Any]] = [
    ((5, 4), np.array([0, 3, 2, 1, 1])),
    ((2, 4, 3), np.array([[0, 3, 2], [1, 1, 2]])),
]
REDUCTIONS = ("mean", "sum", "none")
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((name, draw((3, 4)), {}) for name in ("relu", "tanh", "sigmoid")),
    ("softmax", draw((3, 4)), {"dim": 1}),
    ("softmax", draw((3, 4, 2)), {"dim": 0}),
    ("log_softmax", draw((3, 4)), {"dim": 1}),
    ("log_softmax", draw((3, 4, 2)), {"dim": -1}),
    *(("linear", draw(shape, (2, 3), (2,))[:n], {}) for shape in ((5, 3), (3,), (2, 4, 3), (1, 3)) for n in (2, 3)),
    *(
        ("conv2d", [*draw(image, kernels, kernels[:1])[:n], *(() if n == 3 else (None,)), *options], {})
        for image, kernels, *options in CONVOLUTIONS
        for n in (2, 3)
    ),
    ("max_pool2d", draw((2, 3, 6, 4)), {"kernel_size": 2}),
    ("max_pool2d", draw((2, 3, 7, 5)), {"kernel_size": 2}),
    ("max_pool2d", draw((2, 3, 7, 6)), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("max_pool2d", draw((1, 2, 5, 6)), {"kernel_size": (1, 3), "stride": (2, 1)}),
    ("max_pool2d", draw((1, 2, 8, 7)), {"kernel_size": 2, "stride": 3}),
    *(
        (name, [*draw(shape), labels], {"reduction": reduction})
        for name in ("cross_entropy", "nll_loss")
        for (shape, labels), reduction in itertools.product(LABELS, REDUCTIONS)
    ),
    *(("mse_loss", draw((3, 4), (3, 4)), {"reduction": reduction}) for reduction in REDUCTIONS),
]


def shown(case: tuple[str, list[Any], dict[str, Any]]) -> str:
    name, inputs, options = case
    return f"{name}{[x.shape if isinstance(x, np.ndarray) else x for x in inputs]}{options or ''}"


@pytest.mark.parametrize(("name", "inputs", "options"), CASES, ids=map(shown, CASES))
def test_central_differences(name: str, inputs: list[Any], options: dict[str, Any]) -> None:
    assert gradcheck(lambda *x: getattr(F, name)(*x, **options), inputs)


ONLY_TORCH: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("linear", draw((0, 3), (2, 3), (2,)), {}),
    ("max_pool2d", [TIES], {"kernel_size": 3, "stride": 1}),  # the first of equal values gets the gradient
    ("max_pool2d", draw((1, 2, 40, 40)), {"kernel_size": 17}),  # more positions than a byte tells
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "inputs", "options"), CASES + ONLY_TORCH, ids=map(shown, CASES + ONLY_TORCH))
def test_torch(torch: Any, name: str, inputs: list[Any], options: dict[str, Any], dtype: str) -> None:
    theirs = torch.tanh if name == "tanh" else getattr(torch.nn.functional, name)
    compare(lambda *x: getattr(F, name)(*x, **options), lambda *x: theirs(*x, **options), inputs, dtype)


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
        (y[:, :, :2, :1] * y[:, :, 1:, 1:]).sum().backward()
        outputs.append(y.data)
        gradients.append(image.grad)
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_images_lie_with_the_batch_innermost() -> None:
    y = F.relu(F.max_pool2d(F.conv2d(draw((3, 2, 6, 6))[0], draw((4, 2, 3, 3))[0]), 2))
    assert y.shape == (3, 4, 2, 2)
    assert y.data.transpose(1, 2, 3, 0).flags.c_contiguous
    assert np.shares_memory(y.flatten(1).data, y.data)


def test_max_pool_of_many_positions_keeps_one_number_a_window() -> None:
    image = nn.Parameter(draw((1, 2, 40, 40))[0])
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
    for p, slot in zip(model.parameters(), views(flat, [p.shape for p in model.parameters()]), strict=True):
        p.grad_slot = slot
    copied = []
    monkeypatch.setattr("numpy.copyto", lambda *args, **kwargs: copied.append(args))
    x = draw((4, 2, 6, 6))[0].astype(np.float32)
    model(x).sum().backward()
    assert not copied and not np.isnan(flat).any()
    assert all(p.grad is p.grad_slot and np.shares_memory(p.grad, flat) for p in model.parameters())
    once = flat.copy()
    model(x).sum().backward()
    np.testing.assert_allclose(flat, 2 * once, rtol=1e-5, atol=1e-6)


def call(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: function(*map(np.zeros, shapes))


IMAGE, KERNEL = np.zeros((2, 3), np.float32), (4, 3, 3, 3)
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (IndexError, "Target 3 is out of bounds", lambda: F.nll_loss(IMAGE, np.array([0, 3]))),
    (IndexError, "Target -1 is out of bounds", lambda: F.nll_loss(IMAGE, np.array([0, -1]))),
    (ValueError, "to match target batch_size", lambda: F.nll_loss(IMAGE, np.array([0, 1, 2]))),
    (TypeError, "expected integer classes", lambda: F.cross_entropy(IMAGE, np.array([0.0, 1.0]))),
    (TypeError, "not probabilities: got float64", lambda: F.cross_entropy(IMAGE, np.full((2, 3), 1 / 3))),
    (ValueError, "is not a valid value for reduction", lambda: F.mse_loss(IMAGE, IMAGE, reduction="average")),
    (RuntimeError, r"mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x5\)", call(F.linear, (2, 3), (5, 4))),
    (
        RuntimeError,
        r"expected input\[1, 2, 5, 5\] to have 3 channels, but got 2",
        call(F.conv2d, (1, 2, 5, 5), KERNEL),
    ),
    (RuntimeError, "Kernel size can't be greater than actual input size", call(F.conv2d, (1, 3, 2, 5), KERNEL)),
    (
        ValueError,
        "Expected more than 1 value per channel",
        lambda: nn.BatchNorm1d(IMAGE.shape[1], dtype=IMAGE.dtype)(IMAGE[:1]),
    ),
    (ValueError, "dropout probability has to be between 0 and 1", lambda: F.dropout(IMAGE, 1.5)),
]


@pytest.mark.parametrize(("error", "text", "call"), ERRORS, ids=[text for _, text, _ in ERRORS])
def test_errors(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8"])
def test_layers_refuse_inputs_of_another_dtype(dtype: str) -> None:
    """torch refuses them too; NumPy would go on in float64, twice as slow, through the whole network."""
    x = np.ones((2, 3, 3), dtype)
    for name, call in (
        ("linear", lambda: nn.Linear(3, 2)(x)),
        ("conv2d", lambda: nn.Conv2d(2, 1, 2)(x[None])),
    ):
        wanted = rf"{name} needs input and weight of one dtype, got {dtype} and float32: .*x\.astype\('float32'\)"
        with pytest.raises(RuntimeError, match=wanted):
            call()
    assert nn.Linear(3, 2).to("float64")(x.astype(np.float64)).dtype == np.float64
    if np.dtype(dtype).kind != "f":
        with pytest.raises(RuntimeError, match=r"convert x\.astype\('float64'\)"):
            F.linear(x, np.ones((2, 3)))


TAKES_ARRAYS = {
    "linear": lambda x: F.linear(x, np.ones((2, 4), np.float32)),
    "relu": F.relu,
    "dropout": F.dropout,
    "cross_entropy": lambda x: F.cross_entropy(x, np.array([0, 1])),
    "mse_loss": lambda x: F.mse_loss(np.ones((2, 4), np.float32), x),
}


@pytest.mark.parametrize("name", TAKES_ARRAYS)
@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch", r"got torch\.Tensor: pass x\.numpy\(\), or keep the model torch's"),
        ("jaxlib", r"pass numpy\.asarray\(x\)$"),
    ],
)
def test_other_libraries_arrays_are_refused_with_the_cure(name: str, module: str, said: str) -> None:
    looks = {"__dlpack__": None, "ndim": 2, "shape": (2, 4), "dtype": np.dtype(np.float32)}
    x = type("Tensor", (), {"__module__": module, **looks})()
    with pytest.raises(TypeError, match=said):
        TAKES_ARRAYS[name](x)

"""Arrays of half precision: products, sums, functions and losses are computed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp.autograd import Tensor
from mpiddp.autograd.product import product, total

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


@HALVES
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "gelu"])
def test_functions_compute_in_float32(dtype: Any, name: str) -> None:
    x = (np.random.default_rng(0).standard_normal((3, 2000)) * 3).astype(dtype)
    options = {"dim": 1} if "softmax" in name else {}
    half, single = getattr(F, name)(x, **options), getattr(F, name)(x.astype(np.float32), **options)
    assert half.dtype == dtype
    assert np.array_equal(half.data, single.data.astype(dtype))


LOSSES = ("cross_entropy", "nll_loss", "mse_loss")


@HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_in_float32_and_rounded_once(dtype: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    scores = (rng.standard_normal((50, 3)) * 9).astype(dtype)
    target = rng.integers(0, 3, 50) if name in LOSSES[:2] else rng.random((50, 3), np.float32)
    half, single = Tensor(scores, requires_grad=True), Tensor(scores.astype(np.float32), requires_grad=True)
    loss, expected = getattr(F, name)(half, target), getattr(F, name)(single, target)
    loss.backward()
    expected.backward()
    assert loss.dtype == half.grad.dtype == dtype
    assert loss.data == expected.data.astype(dtype) and np.array_equal(half.grad, single.grad.astype(dtype))

"""Attention against central differences in float64, and against torch if installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp import nn
from mpiddp.autograd import Tensor, gradcheck


def draw(*shapes: tuple[int, ...], dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


SHAPES = {
    "one head": [(5, 3), (4, 3), (4, 2)],
    "heads": [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)],
    "one batch of keys": [(2, 5, 3), (1, 4, 3), (1, 4, 2)],
}
SEEN = np.random.default_rng(1).random((5, 4)) < 0.6
SEEN[:, 0] = True  # torch has NaN for a row that sees nothing
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "booleans": {"attn_mask": SEEN},
    "numbers": {"attn_mask": np.random.default_rng(2).normal(size=(5, 4))},
}
CASES = [(shape, mask) for shape in SHAPES for mask in MASKS if shape != "heads" or "attn_mask" not in MASKS[mask]]


@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_central_differences(shape: str, mask: str) -> None:
    assert gradcheck(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **MASKS[mask]), draw(*SHAPES[shape]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_torch(shape: str, mask: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = draw(*SHAPES[shape], dtype=dtype)
    ours = [Tensor(x, requires_grad=True) for x in arrays]
    theirs = [torch.tensor(x, requires_grad=True) for x in arrays]
    options = dict(MASKS[mask])
    if "attn_mask" in options and options["attn_mask"].dtype != bool:
        options["attn_mask"] = options["attn_mask"].astype(dtype)
    out = F.scaled_dot_product_attention(*ours, **options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.from_numpy(options["attn_mask"])
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, **options)
    assert out.shape == tuple(expected.shape) and out.dtype == dtype
    weights = np.random.default_rng(3).normal(size=out.shape).astype(dtype)
    out.backward(weights)
    expected.backward(torch.from_numpy(weights))
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(out.data, expected.detach().numpy(), rtol=tolerance, atol=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.grad, other.grad.numpy(), rtol=tolerance, atol=tolerance)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = (Tensor(x, requires_grad=True) for x in draw((3, 2), (4, 2), (4, 2)))
    seen = np.ones((3, 4), dtype=bool)
    seen[1] = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out.sum().backward()
    assert not out.data[1].any() and out.data[[0, 2]].all()
    assert all(np.isfinite(x.grad).all() for x in (q, k, v)) and not q.grad[1].any()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = draw((3, 2), (4, 2), (4, 2), dtype="float32")
    assert np.isfinite(F.scaled_dot_product_attention(q * 1e4, k * 1e4, v).data).all()


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    nn.manual_seed(0)
    q, k, v = np.zeros((1, 2), np.float32), np.zeros((4000, 2), np.float32), np.ones((4000, 2), np.float32)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).data
    assert 0.9 < out[0, 0] < 1.1 and out[0, 0] != 1


def test_dropout_has_the_gradient_of_its_mask() -> None:
    """Without dependence on q: out = sum(mask / 4 * v), so v's gradient is the mask's column over 4."""
    nn.manual_seed(1)
    v = Tensor(np.ones((4, 1), np.float32), requires_grad=True)
    out = F.scaled_dot_product_attention(np.zeros((1, 2), np.float32), np.zeros((4, 2), np.float32), v, dropout_p=0.5)
    out.sum().backward()
    assert set(v.grad.ravel().tolist()) <= {0.0, 0.5} and v.grad.sum() == pytest.approx(out.data.sum())


def test_half_precision_is_float32_rounded_once() -> None:
    arrays = draw((2, 5, 4), (2, 300, 4), (2, 300, 3), dtype="float16")
    half = F.scaled_dot_product_attention(*arrays)
    single = F.scaled_dot_product_attention(*(x.astype("float32") for x in arrays))
    assert half.dtype == np.float16
    assert np.array_equal(half.data, single.data.astype(np.float16))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = draw((3, 2), (4, 3), (4, 2))
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4, 3\), \(4, 2\)"):
        F.scaled_dot_product_attention(q, k, v)
    with pytest.raises(RuntimeError, match="should not be set when is_causal"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=np.ones((3, 3), bool), is_causal=True)
    x = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match=r"three axes, \(N, L, E\) .* got shapes \(3, 4\), \(3, 4\) and \(3, 4\)"):
        nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x)
    with pytest.raises(ValueError, match="divisible by num_heads, got 6 and 4"):
        nn.MultiheadAttention(6, 4)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("masked", ["not", "causal", "booleans", "numbers", "heads", "padding"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_layer_against_torch(batch_first: bool, bias: bool, own: bool, masked: str, need_weights: bool) -> None:
    torch = pytest.importorskip("torch")
    nn.manual_seed(0)
    ours = nn.MultiheadAttention(6, 3, bias=bias, batch_first=batch_first)
    theirs = torch.nn.MultiheadAttention(6, 3, bias=bias, batch_first=batch_first)
    shapes = [(name, tuple(p.shape)) for name, p in theirs.named_parameters()]
    assert [(name, p.shape) for name, p in ours.named_parameters()] == shapes
    theirs.load_state_dict({name: torch.tensor(x) for name, x in ours.state_dict().items()})
    x, y = draw((2, 4, 6), (2, 4, 6), dtype="float32")
    n, length = (2, 4) if batch_first else (4, 2)
    upper = np.triu(np.ones((length, length), bool), 1)
    numbers = np.random.default_rng(5).normal(size=(n * 3, length, length)).astype(np.float32)
    hidden = np.zeros((n, length), bool)
    hidden[-1, -1] = True
    given = {
        "not": {},
        "causal": {"attn_mask": upper},
        "booleans": {"attn_mask": upper.T},
        "numbers": {"attn_mask": numbers[0]},
        "heads": {"attn_mask": numbers},
        "padding": {"key_padding_mask": hidden, "attn_mask": upper},
    }[masked]
    mine, other = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    source, its = (mine, other) if own else (Tensor(y), torch.tensor(y))
    options = {"need_weights": need_weights, "average_attn_weights": bias}
    out, seen = ours(mine, source, source, **options, **({"is_causal": True} if masked == "causal" else given))
    expected, its_seen = theirs(
        other, its, its, **options, **{name: torch.from_numpy(mask) for name, mask in given.items()}
    )
    np.testing.assert_allclose(out.data, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert (seen is None) == (its_seen is None) == (not need_weights)
    if need_weights:
        np.testing.assert_allclose(seen.data, its_seen.detach().numpy(), rtol=1e-4, atol=1e-5)
    weights = np.random.default_rng(3).normal(size=out.shape).astype(np.float32)
    out.backward(weights)
    expected.backward(torch.from_numpy(weights))
    np.testing.assert_allclose(mine.grad, other.grad.numpy(), rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_layer_drops_in_training_only() -> None:
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    (x,) = draw((2, 5, 4), dtype="float32")
    for need_weights in (True, False):
        first, second = (layer.train()(x, x, x, need_weights=need_weights)[0].data for _ in range(2))
        assert not np.array_equal(first, second)
        first, second = (layer.eval()(x, x, x, need_weights=need_weights)[0].data for _ in range(2))
        assert np.array_equal(first, second)

"""Every operation of a tensor against central differences in float64, and against torch if installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.oracle import compare

from mpiddp.autograd import Function, Tensor, cat, gradcheck, maximum, minimum, stack, where


def draw(*shapes: tuple[int, ...], low: float = -2.0, high: float = 2.0, seed: int = 0) -> list[np.ndarray]:
    """Draw values, none near a kink at 0."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(low, high, shape) for shape in shapes]
    return [np.where(np.abs(array) < 0.05, 0.3, array) for array in arrays]


MASK = np.array([[True, False, True], [False, False, True]])

# name, function of tensors, inputs; the function must make sense for torch's tensors too
COMMON: list[tuple[str, Callable[..., Any], list[np.ndarray]]] = [
    ("add", lambda a, b: a + b, draw((2, 3), (2, 3))),
    ("add broadcast", lambda a, b: a + b, draw((4, 1, 3), (2, 1))),
    ("add scalar tensor", lambda a, b: a + b, draw((2, 3), ())),
    ("numbers", lambda a: 3 - a * 2 + 1, draw((2, 3))),
    ("subtract broadcast", lambda a, b: a - b, draw((3,), (2, 1))),
    ("multiply broadcast", lambda a, b: a * b, draw((1, 3), (5, 2, 1))),
    ("square by product", lambda a: a * a, draw((2, 3))),
    ("divide", lambda a, b: a / b, draw((2, 3), (3,), low=0.5)),
    ("number divided", lambda a: 2 / a, draw((2, 3), low=0.5)),
    ("power number", lambda a: a**3, draw((2, 3))),
    ("power zero", lambda a: a**0, draw((2, 3))),
    ("power tensor", lambda a, b: a**b, draw((2, 3), (3,), low=0.3)),
    ("number to the power", lambda a: 2**a, draw((2, 3))),
    ("negative", lambda a: -a, draw((3,))),
    ("abs", lambda a: abs(a), draw((2, 3))),
    ("exp", lambda a: a.exp(), draw((2, 3))),
    ("log", lambda a: a.log(), draw((2, 3), low=0.2)),
    ("sqrt", lambda a: a.sqrt(), draw((2, 3), low=0.2)),
    ("neg", lambda a: a.neg(), draw((3,))),
    ("square", lambda a: a.square(), draw((3,))),
    ("pow", lambda a: a.pow(exponent=2), draw((3,))),
    ("relu", lambda a: a.relu(), draw((2, 3))),
    ("add times", lambda a: a.add(a * 2, alpha=3).add(1), draw((2, 3))),
    ("sub times", lambda a: a.sub(a * a, alpha=0.5).sub(2), draw((2, 3))),
    ("mul", lambda a: a.mul(a).mul(3), draw((2, 3))),
    ("div", lambda a: a.div(a * a + 1).div(2), draw((2, 3))),
    ("tanh", lambda a: a.tanh(), draw((2, 3))),
    ("sigmoid", lambda a: a.sigmoid(), draw((2, 3), low=-30, high=30)),
    ("clamp", lambda a: a.clamp(min=-0.5, max=1.0), draw((4, 5))),
    ("clamp one side", lambda a: a.clamp(max=0.5), draw((4, 5))),
    ("matmul", lambda a, b: a @ b, draw((2, 3), (3, 4))),
    ("matmul vector right", lambda a, b: a @ b, draw((2, 3), (3,))),
    ("matmul vector left", lambda a, b: a @ b, draw((3,), (3, 2))),
    ("dot", lambda a, b: a @ b, draw((3,), (3,))),
    ("matmul stack", lambda a, b: a @ b, draw((2, 3, 4), (2, 4, 5))),
    ("matmul stack by one", lambda a, b: a @ b, draw((2, 5, 3, 4), (4, 2))),
    ("matmul one by stack", lambda a, b: a @ b, draw((3, 4), (5, 4, 2))),
    ("matmul broadcast", lambda a, b: a @ b, draw((2, 1, 3, 4), (5, 4, 2))),
    ("matmul stack by vector", lambda a, b: a @ b, draw((2, 3, 4), (4,))),
    ("matmul vector by stack", lambda a, b: a @ b, draw((4,), (2, 4, 3))),
    ("matmul itself", lambda a: a @ a, draw((3, 3))),
    ("sum", lambda a: a.sum(), draw((2, 3))),
    ("sum axis", lambda a: a.sum(dim=1), draw((2, 3, 4))),
    ("sum negative axis keepdim", lambda a: a.sum(-2, keepdim=True), draw((2, 3, 4))),
    ("sum axes", lambda a: a.sum((0, 2)), draw((2, 3, 4))),
    ("mean", lambda a: a.mean(), draw((2, 3))),
    ("mean axes", lambda a: a.mean(dim=(0, -1), keepdim=True), draw((2, 3, 4))),
    ("var", lambda a: a.var(0), draw((5, 3))),
    ("var, biased", lambda a: a.var(1, False), draw((5, 3))),
    ("var, correction", lambda a: a.var(dim=(0, 1), correction=2, keepdim=True), draw((5, 7, 3))),
    ("softmax", lambda a: a.softmax(dim=1), draw((2, 3, 4))),
    ("log_softmax", lambda a: a.log_softmax(dim=-1), draw((2, 3, 4))),
    ("max of two", lambda a: a.max(a * a), draw((2, 3))),
    ("min of two", lambda a: a.min(-a), draw((2, 3))),
    ("amax", lambda a: a.amax(dim=(0, 2)), draw((2, 3, 4))),
    ("amin", lambda a: a.amin(dim=1, keepdim=True), draw((2, 3, 4))),
    ("max", lambda a: a.max(), draw((2, 3))),
    ("max values", lambda a: a.max(dim=1)[0], draw((2, 3, 4))),
    ("min values keepdim", lambda a: a.min(dim=-1, keepdim=True)[0], draw((2, 3, 4))),
    ("reshape", lambda a: a.reshape(3, -1), draw((2, 3, 2))),
    ("view tuple", lambda a: a.view((6, 2)), draw((2, 3, 2))),
    ("flatten", lambda a: a.flatten(start_dim=0, end_dim=1), draw((2, 3, 2))),
    ("T", lambda a: a.T * 2, draw((2, 3))),
    ("transpose", lambda a: a.transpose(dim0=0, dim1=-1), draw((2, 3, 4))),
    ("permute", lambda a: a.permute(2, 0, 1), draw((2, 3, 4))),
    ("permute negative", lambda a: a.permute(-1, 0, 1), draw((2, 3, 4))),
    ("t", lambda a: a.t(), draw((2, 3))),
    ("t of a vector", lambda a: a.t(), draw((3,))),
    ("contiguous", lambda a: a.transpose(0, 2).contiguous(), draw((2, 3, 4))),
    ("view_as", lambda a: a.view_as(a.flatten(1)), draw((2, 3, 2))),
    ("expand_as", lambda a: a.sum(0, keepdim=True).expand_as(a), draw((2, 3))),
    ("squeeze unsqueeze", lambda a: a.squeeze(dim=1).unsqueeze(dim=-1).unsqueeze(0), draw((2, 1, 3))),
    ("expand", lambda a: a.expand(4, 2, 3), draw((2, 1))),
    ("expand keep", lambda a: a.expand(-1, 3), draw((2, 1))),
    ("index row", lambda a: a[1], draw((2, 3))),
    ("index negative", lambda a: a[-1, ..., 1], draw((2, 3, 4))),
    ("index slices", lambda a: a[:, 1:, ::2], draw((2, 3, 5))),
    ("index new axis", lambda a: a[:, None, 1], draw((2, 3))),
    ("index repeated", lambda a: a[[0, 0, -1, 1, 0]], draw((3, 2))),
    ("index pairs", lambda a: a[[0, 1, 0], [2, 2, 2]], draw((2, 3))),
    ("index pairs in tuples", lambda a: a[(0, 1, 0), (2, 2, 2)], draw((2, 3))),
    ("index repeated in a tuple", lambda a: a[:, (0, 0, -1)], draw((2, 3))),
    ("index mask", lambda a: a[MASK], draw((2, 3))),
    ("iterate", lambda a: sum(row * row for row in a), draw((3, 2))),
]
OWN: list[tuple[str, Callable[..., Any], list[np.ndarray]]] = [
    ("where", lambda a, b: where(MASK, a, b), draw((2, 3), (3,))),
    ("where number", lambda a: where(MASK, a, 0.0), draw((2, 3))),
    ("maximum", maximum, draw((2, 3), (3,))),
    ("minimum number", lambda a: minimum(a, 0.5), draw((2, 3))),
    ("cat", lambda a, b: cat([a, b, a], -1), draw((2, 3), (2, 2))),
    ("stack", lambda a, b: stack([a, b], 1), draw((2, 3), (2, 3))),
    ("array on the left", lambda a: np.arange(3.0) * a, draw((2, 3))),
    ("array @ tensor", lambda a: np.arange(6.0).reshape(2, 3) @ a, draw((3, 2))),
]
SEVERAL: list[tuple[str, Callable[..., Any], list[np.ndarray]]] = [
    ("split", lambda a: a.split(split_size=3, dim=1), draw((5, 7, 3))),
    ("split, negative axis", lambda a: a.split(2, -1), draw((5, 7, 3))),
    ("split, sizes", lambda a: a.split([1, 0, 4], dim=0), draw((5, 2))),
    ("split, larger", lambda a: a.split(9), draw((5, 2))),
    ("chunk", lambda a: a.chunk(chunks=3, dim=1), draw((5, 7))),
    ("chunk, fewer", lambda a: a.chunk(4), draw((5, 7))),
    ("chunk, many", lambda a: a.chunk(20, 1), draw((5, 7))),
    ("topk", lambda a: a.topk(3, 1), draw((5, 7, 3))),
    ("topk, smallest", lambda a: a.topk(k=2, dim=-1, largest=False, sorted=True), draw((5, 7, 3))),
    ("topk, all", lambda a: a.topk(5, 0), draw((5, 7))),
    ("topk, none", lambda a: a.topk(0), draw((5, 7))),
    ("double", lambda a: a.double(), draw((2, 3))),
    ("product over nothing", lambda a, b: a @ b, draw((3, 0), (0,))),
    ("product of no rows", lambda a, b: a @ b, draw((2, 0, 3), (3, 4))),
    ("dot product of nothing", lambda a, b: a @ b, draw((0,), (0,))),
]
"""With several results, with other dtypes, or of nothing: without central differences."""


@pytest.mark.parametrize(("function", "inputs"), [case[1:] for case in COMMON + OWN], ids=[c[0] for c in COMMON + OWN])
def test_central_differences(function: Callable[..., Tensor], inputs: list[np.ndarray]) -> None:
    assert gradcheck(function, inputs)


@pytest.mark.parametrize(
    ("function", "inputs"), [case[1:] for case in COMMON + SEVERAL], ids=[c[0] for c in COMMON + SEVERAL]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch(function: Callable[..., Any], inputs: list[np.ndarray], dtype: str) -> None:
    compare(function, function, inputs, dtype)


def test_ties_share_the_gradient() -> None:
    x = Tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    x.amax(1).sum().backward()
    np.testing.assert_allclose(x.grad, [[0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
    a, b = Tensor([1.0, 2.0], requires_grad=True), Tensor([1.0, 3.0], requires_grad=True)
    maximum(a, b).sum().backward()
    np.testing.assert_array_equal(a.grad, [0.5, 0.0])
    np.testing.assert_array_equal(b.grad, [0.5, 1.0])


@pytest.mark.parametrize("ours", [maximum, minimum])
def test_the_larger_of_infinities(ours: Callable[..., Tensor]) -> None:
    """Masked scores are minus infinity, and the difference of two is no number."""
    torch = pytest.importorskip("torch")
    values = np.array([[-np.inf, 1, np.inf, -np.inf, np.nan], [-np.inf, 1, np.inf, 2, 1]], np.float32)
    a, b = (Tensor(each, requires_grad=True) for each in values)
    c, d = (torch.tensor(each, requires_grad=True) for each in values)
    ours(a, b).backward(np.ones(5))
    getattr(torch, ours.__name__)(c, d).backward(torch.ones(5))
    np.testing.assert_array_equal(a.grad, c.grad.numpy())
    np.testing.assert_array_equal(b.grad, d.grad.numpy())


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero", "ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), (1, 3)])
@pytest.mark.parametrize("name", ["sum", "mean", "var"])
def test_reductions_of_little(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    for dim in (None, *range(len(shape))):
        x, y = Tensor(np.ones(shape, np.float32), requires_grad=True), torch.ones(shape, requires_grad=True)
        out, expected = getattr(x, name)(dim), getattr(y, name)(dim)
        np.testing.assert_array_equal(out.data, expected.detach().numpy())
        out.backward(np.ones(out.shape))
        assert x.grad is not None and x.grad.shape == shape


def test_axes_that_are_not_there() -> None:
    x = Tensor(np.zeros((2, 3), np.float32))
    for call in (x.squeeze, x.flatten, x.sum, x.mean):
        for dim in (2, -3):
            with pytest.raises(IndexError, match=f"axis {dim} is out of bounds"):
                call(dim)
    for dim in (3, -4):
        with pytest.raises(IndexError, match="out of bounds"):
            x.unsqueeze(dim)
    with pytest.raises(RuntimeError, match="start_dim cannot come after end_dim"):
        x.flatten(1, 0)
    assert x.sum().squeeze(0).shape == () and x.sum().flatten().shape == (1,)


def test_power_at_zero() -> None:
    x, n = Tensor([0.0, 2.0], requires_grad=True), Tensor([0.0, 0.0], requires_grad=True)
    (x**n).sum().backward()
    np.testing.assert_array_equal(x.grad, [0.0, 0.0])
    np.testing.assert_allclose(n.grad, [0.0, np.log(2.0)], rtol=1e-6)


def test_sigmoid_does_not_overflow() -> None:
    with np.errstate(all="raise"):
        out = Tensor(np.array([-1e4, 0.0, 1e4], np.float32)).sigmoid()
    np.testing.assert_array_equal(out.data, [0, 0.5, 1])


def test_gradients_that_come_through_casts_are_added_in_the_first_dtype() -> None:
    x = Tensor([1.0], requires_grad=True)
    y = x * 1
    (y.to(np.float16).to(np.float32) + y.to(np.float16).to(np.float32)).backward(np.array([40_000], np.float32))
    np.testing.assert_array_equal(x.grad, [80_000])  # infinite in float16


def test_a_function_may_keep_a_dtype() -> None:
    class Widen(Function):
        def forward(self, x: np.ndarray) -> np.ndarray:
            self.dtype = x.dtype
            return x.astype(np.float64)

        def backward(self, grad: np.ndarray) -> np.ndarray:
            return grad * (self.dtype == np.float32)

    x = Tensor([1.0], requires_grad=True)
    Widen.apply(x).sum().backward()
    np.testing.assert_array_equal(x.grad, [1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * np.array([3.0, 4.0]),
        lambda x: x - np.zeros(2),
        lambda x: x.to(np.float64).exp(),
        lambda x: 2**x,
        lambda x: x**2,
    ],
)
def test_a_gradient_has_the_dtype_of_its_tensor(function: Callable[..., Tensor]) -> None:
    seen = []
    x = Tensor([1.0, 2.0], requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append(grad.dtype))
    z = function(y)
    z.register_hook(lambda grad: seen.append(grad.dtype))
    z.sum().backward()
    assert seen == [z.dtype, np.float32]

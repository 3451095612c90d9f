"""Every operation of a tensor against central differences in float64, and against torch if installed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.oracle import compare

from mpiddp.autograd import Function, Tensor, cat, gradcheck, stack, where

from .leaves import with_backward


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
    ("relu", lambda a: a.relu(), draw((2, 3))),
    ("tanh", lambda a: a.tanh(), draw((2, 3))),
    ("sigmoid", lambda a: a.sigmoid(), draw((2, 3), low=-30, high=30)),
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
    ("reshape", lambda a: a.reshape(3, -1), draw((2, 3, 2))),
    ("view tuple", lambda a: a.view((6, 2)), draw((2, 3, 2))),
    ("flatten", lambda a: a.flatten(start_dim=0, end_dim=1), draw((2, 3, 2))),
    ("T", lambda a: a.T * 2, draw((2, 3))),
    ("transpose", lambda a: a.transpose(dim0=0, dim1=-1), draw((2, 3, 4))),
    ("contiguous", lambda a: a.transpose(0, 2).contiguous(), draw((2, 3, 4))),
    ("squeeze unsqueeze", lambda a: a.squeeze(dim=1).unsqueeze(dim=-1).unsqueeze(0), draw((2, 1, 3))),
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
    ("cat", lambda a, b: cat([a, b, a], -1), draw((2, 3), (2, 2))),
    ("stack", lambda a, b: stack([a, b], 1), draw((2, 3), (2, 3))),
    ("array on the left", lambda a: np.arange(3.0) * a, draw((2, 3))),
    ("array @ tensor", lambda a: np.arange(6.0).reshape(2, 3) @ a, draw((3, 2))),
]
OTHERS: list[tuple[str, Callable[..., Any], list[np.ndarray]]] = [
    ("product over nothing", lambda a, b: a @ b, draw((3, 0), (0,))),
    ("product of no rows", lambda a, b: a @ b, draw((2, 0, 3), (3, 4))),
    ("dot product of nothing", lambda a, b: a @ b, draw((0,), (0,))),
    ("power at zero", lambda a, b: a**b, [np.array([0.0, 2.0]), np.zeros(2)]),
    *(
        (f"{name} of {shape}, {dim}", lambda a, name=name, dim=dim: getattr(a, name)(dim), draw(shape))
        for name in ("sum", "mean", "var")
        for shape in ((0, 3), (3, 0), (1,), (1, 3))
        for dim in (None, *range(len(shape)))
    ),
]
"""Of nothing or of little, or at a kink: without central differences."""


@pytest.mark.parametrize(("function", "inputs"), [case[1:] for case in COMMON + OWN], ids=[c[0] for c in COMMON + OWN])
def test_central_differences(function: Callable[..., Tensor], inputs: list[np.ndarray]) -> None:
    assert gradcheck(function, inputs)


@pytest.mark.parametrize(
    ("function", "inputs"), [case[1:] for case in COMMON + OTHERS], ids=[c[0] for c in COMMON + OTHERS]
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero", "ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch(function: Callable[..., Any], inputs: list[np.ndarray], dtype: str) -> None:
    compare(function, function, inputs, dtype)


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

    def note(grad: np.ndarray) -> np.ndarray:
        seen.append(grad.dtype)
        return 2 * grad

    noting = with_backward(note)
    z = noting.apply(function(noting.apply(Tensor([1.0, 2.0], requires_grad=True))))
    z.sum().backward()
    assert seen == [z.dtype, np.float32]

"""Functions of the user's own: their dtypes, errors, and torch's way to write them."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.autograd import Function

from .leaves import leaf


def test_one_array_for_two_inputs_is_nobodys_own() -> None:
    class Both(Function):
        def forward(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return 2 * (x + y)

        def backward(self, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            result = 2 * grad
            return result, result

    a, b = leaf(1), leaf(2)
    Both.apply(a, b).backward()
    assert a.grad is not None and b.grad is not None and not np.shares_memory(a.grad, b.grad)


def test_wrong_shape_from_backward_is_an_error() -> None:
    class Wrong(Function):
        def forward(self, x: np.ndarray) -> np.ndarray:
            return x * 2

        def backward(self, grad: np.ndarray) -> np.ndarray:
            return grad[:1]

    with pytest.raises(RuntimeError, match=r"shape \(1,\) was returned for a leaf of shape \(2,\)"):
        Wrong.apply(leaf(1, 2)).sum().backward()


def test_missing_gradient_from_backward_is_an_error() -> None:
    class Wrong(Function):
        def forward(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return x * y

        def backward(self, grad: np.ndarray) -> np.ndarray:
            return grad

    with pytest.raises(RuntimeError, match=r"Wrong\.backward returned 1 gradients, expected 2"):
        Wrong.apply(leaf(1), leaf(2)).sum().backward()


def test_torch_style_static_functions() -> None:
    class Scale(Function):
        @staticmethod
        def forward(ctx: Function, x: np.ndarray, factor: float) -> np.ndarray:
            ctx.save_for_backward(x)
            ctx.factor = factor
            assert ctx.needs_input_grad == (True, False)
            return x * factor

        @staticmethod
        def backward(ctx: Function, grad: np.ndarray) -> tuple[np.ndarray, None]:
            (x,) = ctx.saved_tensors
            assert x.shape == grad.shape
            return grad * ctx.factor, None

    x = leaf(1, 2)
    Scale.apply(x, 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad, [3, 3])

"""Functions of the user's own: their dtypes, errors, and torch's way to write them."""

import numpy as np
import pytest

from mpiddp.autograd import Function

from .leaves import leaf, with_backward


def test_one_array_for_two_inputs_is_nobodys_own() -> None:
    a, b = leaf(1), leaf(2)
    with_backward(lambda grad: (2 * grad,) * 2).apply(a, b).backward()
    assert a.grad is not None and b.grad is not None and not np.shares_memory(a.grad, b.grad)


def test_wrong_gradients_from_backward_are_errors() -> None:
    with pytest.raises(RuntimeError, match=r"shape \(1,\) was returned for a leaf of shape \(2,\)"):
        with_backward(lambda grad: grad[:1]).apply(leaf(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Own\.backward returned 1 gradients, expected 2"):
        with_backward(lambda grad: grad).apply(leaf(1), leaf(2)).sum().backward()


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

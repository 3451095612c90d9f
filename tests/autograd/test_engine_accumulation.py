"""Gradients in leaves: added up, in slots, owned by nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.autograd import Function, Tensor

from .leaves import leaf


def test_backward_adds_to_an_existing_gradient_in_place() -> None:
    x = leaf(1, 2)
    (x * 3).sum().backward()
    first = x.grad
    (x * 4).sum().backward()
    assert x.grad is first
    np.testing.assert_array_equal(x.grad, [7, 7])


def test_first_accumulation_makes_the_slot_the_gradient() -> None:
    x = leaf(1, 2)
    slot = x.grad_slot = np.full(2, np.nan, np.float32)
    (x * 3).sum().backward()
    assert x.grad is slot
    np.testing.assert_array_equal(slot, [3, 3])
    (x * 4).sum().backward()
    assert x.grad is slot
    np.testing.assert_array_equal(slot, [7, 7])
    x.grad = None
    np.testing.assert_array_equal(slot, [7, 7])
    (x * 5).sum().backward()
    assert x.grad is slot
    np.testing.assert_array_equal(slot, [5, 5])


def test_a_gradient_from_before_the_slot_is_added_to() -> None:
    x = leaf(1)
    x.grad = np.array([10], np.float32)
    x.grad_slot = np.zeros(1, np.float32)
    (x * 3).sum().backward()
    assert x.grad is not x.grad_slot
    np.testing.assert_array_equal(x.grad, [13])
    np.testing.assert_array_equal(x.grad_slot, [0])


@pytest.mark.parametrize("slotted", [False, True])
def test_leaf_used_several_times(slotted: bool) -> None:
    x = leaf(1, 2)
    if slotted:
        x.grad_slot = np.full(2, np.nan, np.float32)
    y = x * 2
    (y * x + x + x * y).sum().backward()
    np.testing.assert_array_equal(x.grad, [9, 17])  # d(4 x^2 + x)


def test_two_leaves_never_share_a_gradient() -> None:
    a, b, c = leaf(1, 2), leaf(3, 4), Tensor([[1.0, 2.0]], requires_grad=True)
    weights = np.ones(2, np.float32)
    (a + b + c.reshape(2)).backward(weights)
    assert a.grad is not None and b.grad is not None and c.grad is not None
    assert not np.shares_memory(a.grad, b.grad)
    a.grad += 1
    np.testing.assert_array_equal(b.grad, [1, 1])
    np.testing.assert_array_equal(c.grad, [[1, 1]])
    c.grad += 1  # came as a view of the weights
    np.testing.assert_array_equal(weights, [1, 1])


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


def test_slot_of_a_hooked_leaf_is_written_once_at_the_end() -> None:
    value = np.arange(9, dtype=np.float32).reshape(3, 3)
    x, y = Tensor(value, requires_grad=True), np.ones((2, 3), np.float32)
    slot = x.grad_slot = np.full((3, 3), np.nan, np.float32)
    x.register_hook(lambda grad: grad * 1)
    ((y @ x) @ x).sum().backward()
    assert x.grad is slot
    plain = Tensor(value, requires_grad=True)
    ((y @ plain) @ plain).sum().backward()
    np.testing.assert_array_equal(slot, plain.grad)


def test_the_callers_gradient_stays_the_callers() -> None:
    x, weights = leaf(1, 2), np.ones(2, np.float32)
    x.backward(weights)
    assert x.grad is not None
    x.grad += 5
    np.testing.assert_array_equal(weights, [1, 1])


def test_gradients_are_c_ordered_and_writable() -> None:
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    x.T.sum(0).sum().backward()
    assert x.grad is not None and x.grad.flags.c_contiguous and x.grad.flags.writeable
    y = Tensor(np.asfortranarray(np.ones((2, 3), np.float32)), requires_grad=True)
    (y * y).sum().backward()
    assert y.grad is not None and y.grad.flags.c_contiguous


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

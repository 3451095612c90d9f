"""Gradients in leaves: added up, in slots, owned by nobody else."""

from __future__ import annotations

import numpy as np

from mpiddp.autograd import Tensor

from .leaves import leaf


def test_first_accumulation_makes_the_slot_the_gradient() -> None:
    x = leaf(1, 2)
    slot = x.grad_slot = np.full(2, np.nan, np.float32)
    for factor, expected in ((3, 3), (4, 7)):
        (x * factor).sum().backward()
        assert x.grad is slot and slot.tolist() == [expected] * 2
    x.grad = None
    assert slot.tolist() == [7, 7]
    (x * 5).sum().backward()
    assert x.grad is slot and slot.tolist() == [5, 5]


def test_a_gradient_from_before_the_slot_is_added_to() -> None:
    x = leaf(1)
    x.grad = np.array([10], np.float32)
    x.grad_slot = np.zeros(1, np.float32)
    (x * 3).sum().backward()
    assert x.grad is not x.grad_slot
    np.testing.assert_array_equal(x.grad, [13])
    np.testing.assert_array_equal(x.grad_slot, [0])


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


def test_gradients_are_c_ordered_and_writable() -> None:
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    x.T.sum(0).sum().backward()
    assert x.grad is not None and x.grad.flags.c_contiguous and x.grad.flags.writeable
    y = Tensor(np.asfortranarray(np.ones((2, 3), np.float32)), requires_grad=True)
    (y * y).sum().backward()
    assert y.grad is not None and y.grad.flags.c_contiguous

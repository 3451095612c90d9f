"""Hooks and callbacks: their calls, order and arguments."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.autograd import Function, Tensor, enable_grad, is_grad_enabled, queue_callback

from .leaves import leaf


class Cut(Function):
    def forward(self, a: np.ndarray) -> np.ndarray:
        return a * 1

    def backward(self, grad: np.ndarray) -> None:
        return None


def test_hooks_fire_once_each_in_the_order_of_readiness() -> None:
    a, b, c = leaf(1), leaf(2), leaf(3)
    order = []
    for name, x in (("a", a), ("b", b), ("c", c)):
        x.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, float(p.grad[0]))))
    (((a * 2) * b) * c).backward()
    assert order == [("c", 4.0), ("b", 6.0), ("a", 12.0)]


def test_shared_leaf_fires_after_its_last_use() -> None:
    shared, last = leaf(2), leaf(5)
    seen = []
    shared.register_post_accumulate_grad_hook(lambda p: seen.append(("shared", float(p.grad[0]))))
    last.register_post_accumulate_grad_hook(lambda p: seen.append(("last", float(p.grad[0]))))
    ((shared * 3) * last * shared).backward()  # 3 s^2 l
    assert seen == [("last", 12.0), ("shared", 60.0)]


def test_leaf_without_gradient_does_not_fire() -> None:
    x, unused, cut = leaf(1), leaf(1), leaf(1)
    fired = []
    for name, p in (("x", x), ("unused", unused), ("cut", cut)):
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    (Cut.apply(cut * 2) + x).backward()
    assert fired == ["x"] and cut.grad is None and unused.grad is None


def test_leaf_whose_last_use_has_no_gradient_still_fires() -> None:
    x, fired = leaf(1), []
    x.register_post_accumulate_grad_hook(lambda p: fired.append(float(p.grad[0])))
    early = Cut.apply(x) * 3
    (early + x * 2).backward()
    assert fired == [2.0]


def test_removed_hook_does_not_fire() -> None:
    x, fired = leaf(1), []
    handle = x.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    with x.register_post_accumulate_grad_hook(lambda p: fired.append(2)):
        (x * 2).backward()
    handle.remove()
    handle.remove()
    (x * 2).backward()
    assert fired == [1, 2]


def test_hooks_are_refused_where_they_would_never_fire() -> None:
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        Tensor([1.0]).register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError, match="cannot be registered on non-leaf tensors"):
        (leaf(1) * 2).register_post_accumulate_grad_hook(print)


def test_callback_runs_once_after_all_hooks() -> None:
    a, b, events = leaf(1), leaf(2), []

    def hook(parameter: Tensor) -> None:
        if not events:
            queue_callback(lambda: (events.append("end"), queue_callback(lambda: events.append("after"))))
        events.append("hook")

    a.register_post_accumulate_grad_hook(hook)
    b.register_post_accumulate_grad_hook(hook)
    (a * b).backward()
    assert events == ["hook", "hook", "end", "after"]
    (a * b).backward()
    assert events[4:] == ["hook", "hook"]


def test_callback_outside_of_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Final callbacks can only be installed during backward pass"):
        queue_callback(print)


def test_error_in_a_hook_leaves_nothing_behind() -> None:
    x, ran = leaf(1), []

    def fail(parameter: Tensor) -> None:
        queue_callback(lambda: ran.append(1))
        raise KeyError("in hook")

    handle = x.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="in hook"):
        (x * 2).backward()
    assert is_grad_enabled() and not ran
    with pytest.raises(RuntimeError, match="Final callbacks"):
        queue_callback(print)
    handle.remove()
    x.grad = None
    (x * 2).backward()
    np.testing.assert_array_equal(x.grad, [2])
    assert not ran


def test_backward_inside_of_a_hook_has_callbacks_of_its_own() -> None:
    x, events = leaf(1), []

    def hook(parameter: Tensor) -> None:
        queue_callback(lambda: events.append("outer"))
        y = leaf(1)
        y.register_post_accumulate_grad_hook(lambda p: queue_callback(lambda: events.append("inner")))
        with enable_grad():
            (y * 2).backward()

    x.register_post_accumulate_grad_hook(hook)
    (x * 2).backward()
    assert events == ["inner", "outer"]

"""Hooks and callbacks: their calls, order and arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpiddp.autograd import Tensor, enable_grad, is_grad_enabled, queue_callback

from .leaves import leaf, with_backward

Cut = with_backward(lambda grad: None)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda a, b, c: a * 2 * b * c, [("c", 4), ("b", 6), ("a", 12)], id="once each, when ready"),
        pytest.param(lambda a, b, c: b * 3 * c * b, [("c", 12), ("b", 36)], id="shared: after its last use"),
        pytest.param(lambda a, b, c: Cut.apply(b * 2) + a, [("a", 1)], id="not without a gradient"),
        pytest.param(lambda a, b, c: Cut.apply(a) * 3 + a * 2, [("a", 2)], id="last use without a gradient"),
    ],
)
def test_hooks_of_leaves_fire(function: Callable[..., Tensor], expected: list[tuple[str, float]]) -> None:
    leaves = {"a": leaf(1), "b": leaf(2), "c": leaf(3)}
    order = []
    for name, x in leaves.items():
        x.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, float(p.grad[0]))))
    function(**leaves).backward()
    assert order == expected
    assert {name for name, x in leaves.items() if x.grad is not None} == {name for name, _ in expected}


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

"""Backward's effect on the graph, recording, gradients in leaves and their slots, hooks and callbacks."""

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from mpiddp.autograd import Tensor, enable_grad, is_grad_enabled, no_grad, queue_callback

from .leaves import leaf, with_backward


def test_second_backward() -> None:
    x = leaf(1, 2)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, [4, 8])
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


def test_backward_frees_what_was_saved() -> None:
    x = leaf(1, 2)
    inner = x * 2
    saved = weakref.ref(inner.data)
    loss = (inner * inner).sum()
    del inner
    assert saved() is not None
    loss.backward()
    gc.collect()
    assert saved() is None


@pytest.mark.parametrize("backward", [True, False])
def test_deep_graph(backward: bool) -> None:
    x = leaf(1)
    y = x
    for _ in range(20_000):
        y = y + 1
    if backward:
        y.backward()
        np.testing.assert_array_equal(x.grad, [1])
    del y  # a graph that is dropped must not overflow the stack either


def test_diamond_runs_each_node_once() -> None:
    calls = []

    def count(grad: np.ndarray) -> np.ndarray:
        calls.append(grad.copy())
        return grad

    y = with_backward(count).apply(leaf(1) * 1)
    for _ in range(40):  # 2 ** 40 paths
        y = y + y
    y.backward()
    np.testing.assert_array_equal(calls, [[2.0**40]])


def test_errors_of_backward() -> None:
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        Tensor([1.0]).backward()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        (x * 2).backward(np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        Tensor(np.arange(3), requires_grad=True)


def test_no_grad_as_context_and_decorator() -> None:
    x = leaf(1)

    @no_grad()
    def double(a: Tensor) -> Tensor:
        return a * 2

    with no_grad():
        assert not is_grad_enabled() and not (x * 2).requires_grad
        with enable_grad():
            assert (x * 2).requires_grad
        assert not is_grad_enabled()
    assert is_grad_enabled()
    assert not double(x).requires_grad and double.__name__ == "double"
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert is_grad_enabled()


def test_threads_have_switches_and_backwards_of_their_own() -> None:
    results, gate = {}, threading.Barrier(4)

    def train(number: int) -> None:
        x, fired = leaf(number), []
        x.register_post_accumulate_grad_hook(lambda p: queue_callback(lambda: fired.append(float(p.grad[0]))))
        gate.wait(10)
        for _ in range(50):
            x.grad = None
            (x * x).sum().backward()
        results[number] = fired

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    with no_grad():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert all(results[i] == [2.0 * i] * 50 for i in range(4))


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

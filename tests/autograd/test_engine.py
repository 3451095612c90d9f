"""Backward's effect on the graph, and recording."""

from __future__ import annotations

import gc
import threading
import weakref

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

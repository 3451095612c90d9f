"""Leaves, slots, hooks, callbacks, and what backward does to the graph."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest

from mpiddp.autograd import (
    Function,
    Tensor,
    enable_grad,
    is_grad_enabled,
    no_grad,
    queue_callback,
)
from mpiddp.errors import ArrayError
from mpiddp.typing import HoldsArray


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float32), requires_grad=True)


# -- accumulation and slots ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("slotted", [False, True])
def test_leaf_that_is_both_sides_of_a_product(slotted: bool) -> None:
    value = np.arange(9, dtype=np.float32).reshape(3, 3)
    x = Tensor(value, requires_grad=True)
    if slotted:
        x.grad_slot = np.full((3, 3), np.nan, np.float32)
    (x @ x).sum().backward()
    one = np.ones((3, 3), np.float32)
    np.testing.assert_array_equal(x.grad, one @ value.T + value.T @ one)


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


# -- hooks ---------------------------------------------------------------------------------------------------------


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

    class Cut(Function):
        def forward(self, a: np.ndarray) -> np.ndarray:
            return a * 1

        def backward(self, grad: np.ndarray) -> None:
            return None

    (Cut.apply(cut * 2) + x).backward()
    assert fired == ["x"] and cut.grad is None and unused.grad is None


def test_leaf_whose_last_use_has_no_gradient_still_fires() -> None:
    x, fired = leaf(1), []
    x.register_post_accumulate_grad_hook(lambda p: fired.append(float(p.grad[0])))

    class Cut(Function):
        def forward(self, a: np.ndarray) -> np.ndarray:
            return a * 1

        def backward(self, grad: np.ndarray) -> None:
            return None

    early = Cut.apply(x) * 3
    (early + x * 2).backward()
    assert fired == [2.0]


def test_leaf_that_is_the_root() -> None:
    x, fired = leaf(1), []
    x.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.copy()))
    x.backward()
    assert len(fired) == 1
    np.testing.assert_array_equal(x.grad, [1])


def test_removed_hook_does_not_fire() -> None:
    x, fired = leaf(1), []
    handle = x.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    with x.register_hook(lambda g: g * 100):
        (x * 2).backward()
    handle.remove()
    handle.remove()
    (x * 2).backward()
    assert fired == [1]
    np.testing.assert_array_equal(x.grad, [202])


@pytest.mark.parametrize("slotted", [False, True])
def test_gradient_hook_on_a_leaf_sees_the_whole_gradient_of_this_backward(slotted: bool) -> None:
    x, seen = leaf(1, 2), []
    if slotted:
        x.grad_slot = np.full(2, np.nan, np.float32)

    def double(grad: np.ndarray) -> np.ndarray:
        seen.append(grad.copy())
        return grad * 2

    x.register_hook(double)
    for _ in range(2):
        (x * 3 + x).sum().backward()
    np.testing.assert_array_equal(seen, [[4, 4], [4, 4]])
    np.testing.assert_array_equal(x.grad, [16, 16])
    assert not slotted or x.grad is x.grad_slot


def test_gradient_hook_inside_the_graph() -> None:
    x, seen = leaf(1, 2), []
    y = x * 3
    y.register_hook(lambda grad: seen.append(grad.copy()))
    y.register_hook(lambda grad: grad * 10)
    (y + y * 2).sum().backward()
    np.testing.assert_array_equal(seen, [[3, 3]])
    np.testing.assert_array_equal(x.grad, [90, 90])


def test_hooks_are_refused_where_they_would_never_fire() -> None:
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        Tensor([1.0]).register_hook(print)
    with pytest.raises(RuntimeError, match="cannot be registered on non-leaf tensors"):
        (leaf(1) * 2).register_post_accumulate_grad_hook(print)


# -- callbacks -----------------------------------------------------------------------------------------------------


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


# -- the graph -----------------------------------------------------------------------------------------------------


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

    class Count(Function):
        def forward(self, a: np.ndarray) -> np.ndarray:
            return a * 1

        def backward(self, grad: np.ndarray) -> np.ndarray:
            calls.append(grad.copy())
            return grad

    x = leaf(1)
    y = Count.apply(x * 1)
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
    with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
        (x * 2).requires_grad_(False)


def test_frozen_leaf_gets_no_gradient() -> None:
    x, w = leaf(1), leaf(2)
    w.requires_grad_(False)
    (x * w).backward()
    assert w.grad is None
    np.testing.assert_array_equal(x.grad, [2])


# -- recording -----------------------------------------------------------------------------------------------------


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


def test_one_no_grad_object_nests() -> None:
    guard = no_grad()
    with guard:
        with guard:
            pass
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_threads_have_switches_and_backwards_of_their_own() -> None:
    inside, results, gate = threading.Event(), {}, threading.Barrier(4)

    def other() -> None:
        inside.wait(10)
        results["enabled"] = is_grad_enabled()

    thread = threading.Thread(target=other)
    thread.start()
    with no_grad():
        inside.set()
        thread.join(10)
    assert results["enabled"]

    def train(number: int) -> None:
        x, fired = leaf(number), []
        x.register_post_accumulate_grad_hook(lambda p: queue_callback(lambda: fired.append(float(p.grad[0]))))
        gate.wait(10)
        for _ in range(50):
            x.grad = None
            (x * x).sum().backward()
        results[number] = fired

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(results[i] == [2.0 * i] * 50 for i in range(4))


# -- what a tensor is ----------------------------------------------------------------------------------------------


def test_protocol_attribute() -> None:
    x = leaf(1, 2)
    assert isinstance(x, HoldsArray) and x.__mpiddp_array__ is x.data
    assert (Tensor([1.0]) * 2).__mpiddp_array__.shape == (1,)
    y = x * 2
    assert y.detach().__mpiddp_array__ is y.data
    with pytest.raises(ArrayError, match=r"detach\(\)"):
        _ = y.__mpiddp_array__


def test_numpy_is_refused_where_it_would_lose_the_gradient() -> None:
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match="Can't call numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="Can't call numpy"):
        np.asarray(x)
    assert x.detach().numpy() is x.data
    np.testing.assert_array_equal(np.asarray(x.detach(), dtype=np.float64), [1.0, 2.0])


def test_data_is_kept_and_python_floats_are_float32() -> None:
    array = np.arange(3.0)
    assert Tensor(array).data is array
    assert Tensor([1.0, 2.0]).dtype == np.float32
    assert Tensor(np.float64(1)).dtype == np.float64
    assert Tensor([1, 2]).dtype.kind == "i"
    assert Tensor(Tensor(array)).data is array


def test_data_is_assignable() -> None:
    x = leaf(1, 2)
    x.data = x.data * 3
    (x * x).sum().backward()
    np.testing.assert_array_equal(x.grad, [6, 12])


def test_conversions() -> None:
    x = Tensor([[1.5, 2.0]])
    assert len(x) == 1 and x.ndim == 2 and x.size == x.numel() == 2 and x.is_leaf
    assert x[0, 0].item() == 1.5 and float(x[0, 1]) == 2.0 and int(x[0, 1]) == 2 and x.tolist() == [[1.5, 2.0]]
    assert f"{x[0, 0]:.3f}" == "1.500"
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(x.sum())
    assert "requires_grad=True" in repr(leaf(1)) and "grad_fn=<Multiply>" in repr(leaf(1) * 2)


def test_comparisons_hash_by_identity_and_compare_by_value() -> None:
    a, b = leaf(1, 2), leaf(1, 3)
    assert (a == b).tolist() == [True, False] and (a < b).tolist() == [False, True]
    assert not (a >= b).requires_grad
    assert len({a, b, a}) == 2


def test_argmax_and_indices() -> None:
    x = Tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 3.0]], requires_grad=True)
    values, indices = x.max(1)
    assert indices.tolist() == x.argmax(1).tolist() == [1, 0] and values.tolist() == [5.0, 7.0]
    assert int(x.argmin()) == 4


def test_deepcopy_takes_neither_slot_nor_hooks() -> None:
    x, fired = leaf(1), []
    x.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    x.grad_slot = np.zeros(1, np.float32)
    twin = copy.deepcopy(x)
    (twin * 2).backward()
    assert not fired and twin.grad_slot is None and x.grad is None
    assert not np.shares_memory(twin.data, x.data)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)

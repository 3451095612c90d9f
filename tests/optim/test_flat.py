import gc
import weakref
from typing import Any

import numpy as np
import pytest

from mpiddp.device.packing import views
from mpiddp.optim import SGD, Adam, Optimizer
from mpiddp.optim.flat import BLOCK, are_adjacent, flat_view

from .test_optimizer import CASES, Parameter

SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (), (2, 1, 3), (BLOCK + 7,), (0, 3), (6,)]


def models(dtype: Any = np.float32, seed: int = 0) -> tuple[list[Parameter], list[Parameter], list[Any], np.ndarray]:
    """Return the same parameters apart and side by side, and slots for the gradients of the latter."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(sum(int(np.prod(shape)) for shape in SHAPES)).astype(dtype)
    together = [Parameter(view) for view in views(flat, SHAPES)]
    apart = [Parameter(view.copy()) for view in views(flat, SHAPES)]
    return apart, together, list(views(np.empty_like(flat), SHAPES)), flat


def set_grads(rng: Any, apart: list[Parameter], together: list[Parameter], slots: list[Any], skip: Any = ()) -> None:
    for i, (a, t, slot) in enumerate(zip(apart, together, slots, strict=True)):
        slot[...] = rng.standard_normal(slot.shape)
        a.grad = None if i in skip else slot.copy()
        t.grad = None if i in skip else slot


def assert_same(apart: list[Parameter], together: list[Parameter]) -> None:
    for i, (a, t) in enumerate(zip(apart, together, strict=True)):
        assert a.data.tobytes() == t.data.tobytes(), i


def bits(state: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.tobytes()) for name, value in state.items()}


def count_updates(optimizer: Optimizer) -> list[int]:
    counts: list[int] = []
    update = optimizer._update
    optimizer._update = lambda run, group: (counts.append(run.data.size), update(run, group))  # type: ignore
    return counts


@pytest.mark.parametrize("first", [set(), {1}], ids=["in one update", "in parts"])
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_same_bits_while_gradients_come_and_go(cls: Any, options: dict[str, Any], first: set[int]) -> None:
    apart, together, slots, flat = models()
    one, other = cls(apart, **options), cls(together, **options)
    counts = count_updates(other)
    rng = np.random.default_rng(1)
    for step in range(24):
        skip = {i for i in range(len(SHAPES)) if rng.random() < 0.3} if step % 4 else {0, 3}
        if step < 3:
            skip = first
        set_grads(rng, apart, together, slots, skip)
        if step % 5 == 4:  # gradients that lie anywhere
            for t in together:
                t.grad = None if t.grad is None else t.grad.copy()
        if step == 16:  # a replaced array
            together[1].data = together[1].data.copy()
        one.step()
        other.step()
        assert_same(apart, together)
        if step in (2, 11, 23):
            for a, t in zip(apart, together, strict=True):
                assert bits(one.state[a]) == bits(other.state[t])
        if step in (1, 11):
            other.load_state_dict(one.state_dict())
    assert (counts[:3] == [flat.size] * 3) == (not first)


def test_gradients_in_two_buckets_make_two_updates() -> None:
    apart, together, _, _ = models()
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    buckets = list(views(np.empty(sum(sizes[:3]), np.float32), SHAPES[:3]))
    buckets += views(np.empty(sum(sizes[3:]), np.float32), SHAPES[3:])
    one, other = Adam(apart), Adam(together)
    counts = count_updates(other)
    set_grads(np.random.default_rng(2), apart, together, buckets)
    for _ in range(3):
        one.step()
        other.step()
    assert_same(apart, together)
    assert counts == [sum(sizes[:3]), sum(sizes[3:])] * 3


def test_memory_between_neighbours_is_left_alone() -> None:
    flat, grads = np.ones(10, np.float32), np.ones(10, np.float32)
    params = [Parameter(flat[0:3]), Parameter(flat[4:6]), Parameter(flat[6:9])]
    for param, (a, b) in zip(params, [(0, 3), (4, 6), (6, 9)], strict=True):
        param.grad = grads[a:b]
    optimizer = SGD(params, lr=0.5)
    counts = count_updates(optimizer)
    optimizer.step()
    assert flat.tolist() == [0.5, 0.5, 0.5, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1]
    assert counts == [3, 5]


def test_steps_allocate_nothing_when_laid_out_flat() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    _, together, slots, _ = models(np.float64)
    optimizer = Adam(together, weight_decay=0.1)
    for param, slot in zip(together, slots, strict=True):
        slot[...] = 1.0
        param.grad = slot
    optimizer.step()
    tracemalloc.start()
    optimizer.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000


def test_gradients_are_not_kept_alive() -> None:
    param = Parameter(np.ones(4))
    param.grad = np.ones(4)
    optimizer = SGD([param], momentum=0.9)
    optimizer.step()
    grad = weakref.ref(param.grad)
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None


def test_strided_arrays_are_updated_in_place() -> None:
    rng = np.random.default_rng(4)
    whole = rng.standard_normal((6, 8))
    start = whole.copy()
    params = [Parameter(whole[:, ::2].T), Parameter(np.asfortranarray(rng.standard_normal((3, 5))))]
    plain = [Parameter(p.data.copy(order="C")) for p in params]
    one, other = Adam(plain), Adam(params)
    for _ in range(3):
        for a, b in zip(plain, params, strict=True):
            a.grad = rng.standard_normal(a.data.shape)
            b.grad = np.asfortranarray(a.grad)
        one.step()
        other.step()
    for a, b in zip(plain, params, strict=True):
        assert np.array_equal(a.data, b.data)
    assert np.array_equal(whole[:, 1::2], start[:, 1::2]) and not np.array_equal(whole[:, ::2], start[:, ::2])
    contiguous = Parameter(np.ones((2, 3)))
    contiguous.grad = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    SGD([contiguous], lr=1.0, momentum=0.5).step()
    assert np.array_equal(contiguous.data, 1 - np.arange(6.0).reshape(2, 3))


def test_neighbours_of_one_array_and_type_adjoin() -> None:
    flat = np.zeros(8, np.float32)
    assert not are_adjacent(flat[:2], flat[2:4].view(np.int32))
    assert not are_adjacent(flat[:4:2], flat[4:])
    assert not are_adjacent(flat[:4], np.zeros(4, np.float32))
    memory = memoryview(bytearray(32))
    left, right = np.frombuffer(memory, np.float32, 4), np.frombuffer(memory, np.float32, 4, 16)
    assert not are_adjacent(left, right)
    fortran = np.zeros((4, 2), order="F")
    pair = fortran[:2, 0], fortran[2:, 0]
    assert are_adjacent(*pair)
    flat_view(pair)[...] = 1
    assert fortran.tolist() == [[1, 0]] * 4

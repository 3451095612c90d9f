"""Tensors as seen by NumPy, by Python, and by communication."""

import copy

import numpy as np
import pytest

from mpiddp.autograd import Tensor
from mpiddp.errors import ArrayError
from mpiddp.typing import HoldsArray

from .leaves import leaf


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
    for call in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(RuntimeError, match="Can't call numpy"):
            call()
    assert x.detach().numpy() is x.data
    np.testing.assert_array_equal(np.asarray(x.detach(), dtype=np.float64), [1.0, 2.0])


def test_data_is_kept_and_python_floats_are_float32() -> None:
    array = np.arange(3.0)
    assert Tensor(array).data is array
    assert Tensor([1.0, 2.0]).dtype == np.float32
    assert Tensor(np.float64(1)).dtype == np.float64
    assert Tensor([1, 2]).dtype.kind == "i"
    assert Tensor(Tensor(array)).data is array


def test_conversions() -> None:
    x = Tensor([[1.5, 2.0]])
    assert len(x) == 1 and x.ndim == 2 and x.size == 2 and x.is_leaf
    assert x[0, 0].item() == 1.5 and float(x[0, 1]) == 2.0 and int(x[0, 1]) == 2 and x.tolist() == [[1.5, 2.0]]
    assert f"{x[0, 0]:.3f}" == "1.500"
    with pytest.raises(TypeError, match="unsized object"):
        len(x.sum())
    assert "requires_grad=True" in repr(leaf(1)) and "grad_fn=<Multiply>" in repr(leaf(1) * 2)


def test_hash_is_by_identity() -> None:
    a, b = leaf(1, 2), leaf(1, 3)
    assert len({a, b, a}) == 2 and (a == b).astype("float32").mean().item() == 0.5


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

"""Methods of the tensor beside torch's: comparisons, conversions, in place, errors."""

import numpy as np
import pytest
from harness.oracle import draw

from mpiddp.autograd import Tensor, no_grad

torch = pytest.importorskip("torch")


X, Y = draw((5, 7, 3), (5, 7, 3))
MASK = Y > 0.3


@pytest.mark.parametrize("name", ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"])
def test_comparisons(name: str) -> None:
    other = np.where(MASK, X, 0)
    for operand, theirs in ((other, torch.tensor(other)), (0.5, 0.5)):
        mine = getattr(Tensor(X), name)(operand)
        assert mine.dtype == bool and not mine.requires_grad
        assert np.array_equal(mine.numpy(), getattr(torch.tensor(X), name)(theirs).numpy())


def test_booleans() -> None:
    a, b, x, y = Tensor(MASK), Tensor(X > 0), torch.tensor(MASK), torch.tensor(X > 0)
    for mine, theirs in ((a & b, x & y), (a | b, x | y), (~a, ~x)):
        assert np.array_equal(mine.numpy(), theirs.numpy())


def test_size_is_numpys_and_torchs() -> None:
    x = Tensor(X)
    assert x.size == X.size and x.size() == X.shape and x.size(-1) == x.size(2) == 3
    assert x.ndim == torch.tensor(X).dim() and tuple(torch.tensor(X).size()) == x.size()
    with pytest.raises(IndexError):
        x.size(3)
    n, *_ = x.size()
    assert n == 5 and Tensor(np.zeros((0, 2))).size == 0 and Tensor(1.0).size == 1


def test_to_a_device_a_dtype_or_another_tensor() -> None:
    x = Tensor(X, requires_grad=True)
    assert x.to("cpu") is x and x.cpu() is x and x.to("float64") is x and x.device == "cpu"
    assert x.to("cpu", non_blocking=True) is x and x.to("cpu", copy=True) is not x
    for single in (x.to("cpu", np.float32), x.to(np.float32), x.to(dtype="float32"), x.to(Tensor([1.0]))):
        assert single.dtype == np.float32 and single.requires_grad
    x.to("cpu", "float32").sum().backward()
    assert x.grad is not None and x.grad.dtype == np.float64 and (x.grad == 1).all()
    assert not x.astype(int).requires_grad and x.astype(int).dtype == np.int64 and x.astype(bool).dtype == bool
    with no_grad():
        assert not x.to(np.float32).requires_grad
    for wrong in ("gpu", "cuda:x", None, 1.5, True):
        with pytest.raises(TypeError, match="to\\(\\) takes"):
            x.to(wrong)
    with pytest.raises(TypeError, match="to\\(\\) takes"):
        x.to("float32", "float32")


def test_to_a_gpu_that_is_not_there_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpiddp.device.place.cuda_fault", lambda: "CuPy is not installed")
    for move in (lambda x: x.to("cuda"), lambda x: x.cuda(), lambda x: x.to(1)):
        with pytest.raises(ValueError, match=r"CuPy is not installed.*device_count\(\) else \"cpu\""):
            move(Tensor(X))


def test_in_place_operations_write_to_the_array() -> None:
    array = np.arange(4, dtype=np.float32)
    x = Tensor(array)
    with no_grad():
        x += 2
        x *= 3
        x -= 2
        x /= 4
    assert x.data is array and array.tolist() == [1, 1.75, 2.5, 3.25]
    x[1] = 7
    x[Tensor([2, 3])] = Tensor([8.0, 9.0])
    assert array.tolist()[1:] == [7, 8, 9]
    x[...] = np.arange(4)
    assert array.tolist() == [0, 1, 2, 3]
    whole = Tensor(np.arange(3))
    with no_grad(), pytest.raises(TypeError):
        whole += 0.5


def test_in_place_operations_leave_the_tape_right() -> None:
    p = Tensor([1.0, 2.0], requires_grad=True)
    data = p.data
    (p * p).sum().backward()
    with no_grad():
        p -= 0.5 * p.grad
        p *= 2
    assert p.data is data and data.tolist() == [0, 0] and p.is_leaf and p.requires_grad
    for wrong in (lambda: p.__setitem__(0, 1), lambda: p.__iadd__(1)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            wrong()
    q = p * 2
    with pytest.raises(RuntimeError, match="backward needs"):
        q[0] = 1
    with pytest.raises(RuntimeError, match="backward needs"):
        Tensor([1.0, 2.0])[...] = p
    total = Tensor(0.0)
    for _ in range(3):
        total += (p * 3).sum()  # a new tensor each time, as the tape needs
    total.backward()
    assert p.grad.tolist() == [2 + 9, 4 + 9]


def test_numpy_by_force_and_backward_as_torch_spells_it() -> None:
    x = Tensor(X, requires_grad=True)
    assert x.numpy(force=True) is x.data
    y = (x * x).sum()
    y.backward(None, True)
    y.backward(gradient=None, retain_graph=None)
    np.testing.assert_allclose(x.grad, 4 * X)

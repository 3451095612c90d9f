"""``gradcheck``, which compares gradients with central differences."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, download

from .function import no_grad
from .tensor import Tensor


def gradcheck(
    func: Callable[..., Tensor], inputs: Sequence[Any], eps: float = 1e-6, atol: float = 1e-5, rtol: float = 1e-3
) -> bool:
    """Compare backward with central differences of step ``eps`` in float64.

    Return True, or raise AssertionError, which shows both. ``func`` takes tensors, returns one, and must be
    deterministic. Floating-point ``inputs`` are copied to float64 and checked, others passed on as they are.

    Examples
    --------
    >>> from mpiddp.autograd import gradcheck
    >>> gradcheck(lambda x: (x * x).sum(), [[1.0, 2.0]])
    True
    """
    tensors = [_leaf(value) for value in inputs]
    output = func(*tensors)
    # With equal weights a gradient at a wrong position could go unnoticed.
    weights = np.random.default_rng(0).uniform(0.5, 1.5, output.shape)
    weights = array_namespace(output.data).asarray(weights)
    output.backward(weights)
    for number, tensor in enumerate(tensors):
        if not (isinstance(tensor, Tensor) and tensor.requires_grad):
            continue
        found = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad
        expected = np.zeros(tensor.shape)
        with no_grad():
            for position in np.ndindex(tensor.shape):
                value = float(tensor.data[position])
                tensor.data[position] = value + eps
                above = func(*tensors).data.copy()
                tensor.data[position] = value - eps
                below = func(*tensors).data.copy()
                tensor.data[position] = value
                expected[position] = float(((above - below) * weights).sum()) / (2 * eps)
        what = f"the gradient of input {number}, beside central differences"
        np.testing.assert_allclose(download(found), expected, rtol, atol, err_msg=what)
    return True


def _leaf(value: Any) -> Any:
    data = value.data if isinstance(value, Tensor) else value
    if isinstance(data, int | bool | str | None):
        return value
    array = array_namespace(data).array(data)
    return Tensor(array.astype(np.float64), requires_grad=True) if array.dtype.kind == "f" else value

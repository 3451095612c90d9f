"""The expected values of a function and its gradients: torch's, on the same inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpiddp.autograd import Tensor


def draw(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def both(value: Any, dtype: Any = None) -> tuple[Any, Any]:
    """Return an input for us and for torch: leaves of an array of floats, else the same values."""
    torch = pytest.importorskip("torch")
    if not isinstance(value, np.ndarray):
        return value, value
    if value.dtype.kind != "f":
        return value, torch.from_numpy(value)
    data = value.astype(dtype or value.dtype)
    return Tensor(data.copy(), requires_grad=True), torch.tensor(data, requires_grad=True)


def compare(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    inputs: Sequence[Any],
    dtype: Any = None,
    tolerance: float | None = None,
) -> None:
    """Assert that two functions have equal values and gradients; arrays of floats are cast to ``dtype``, if given."""
    mine, others = zip(*(both(value, dtype) for value in inputs), strict=True)
    outputs, expected = _flat(ours(*mine)), _flat(theirs(*others))
    for seed, (y, wanted) in enumerate(zip(outputs, expected, strict=True)):
        limit = tolerance or {"float32": 1e-4, "float64": 1e-10}.get(str(y.dtype), 0)
        assert str(wanted.dtype) == f"torch.{y.dtype}" and y.requires_grad == wanted.requires_grad
        values = wanted.detach().numpy()
        np.testing.assert_allclose(y.numpy(force=True), values, rtol=limit, atol=limit, strict=True)
        if y.requires_grad:
            (weights,) = draw(y.shape, seed=1 + seed, dtype=y.dtype)
            y.backward(weights, retain_graph=True)
            wanted.backward(pytest.importorskip("torch").from_numpy(weights), retain_graph=True)
    for x, other in zip(mine, others, strict=True):
        if isinstance(x, Tensor):
            limit = tolerance or (1e-4 if any(str(y.dtype) == "float32" for y in outputs) else 1e-10)
            assert x.grad is not None and x.grad.dtype == x.dtype and x.grad.flags.c_contiguous
            np.testing.assert_allclose(x.grad, other.grad.numpy(), rtol=limit, atol=limit, strict=True)


def compare_modules(ours: Any, theirs: Any, inputs: Sequence[Any]) -> None:
    """Give our module the state of torch's; assert equal results, gradients and states after a forward and backward."""
    wanted = theirs.state_dict()
    assert [(key, x.shape) for key, x in ours.state_dict().items()] == [(key, x.shape) for key, x in wanted.items()]
    ours.load_state_dict({key: x.detach().numpy() for key, x in wanted.items()})
    ours.zero_grad()
    theirs.zero_grad()
    compare(ours, theirs, inputs, dtype="float32", tolerance=1e-4)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
    for key, x in theirs.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[key], x.numpy(), rtol=1e-5, atol=1e-6, err_msg=key)


def _flat(results: Any) -> list[Any]:
    return [results] if hasattr(results, "shape") else [one for result in results for one in _flat(result)]

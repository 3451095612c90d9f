"""clip_grad_norm_ beside torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpiddp import nn


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_grad_norm(norm_type: float, max_norm: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    ours = [nn.Parameter(np.zeros(s, np.float32)) for s in ((3, 4), (5,), (2,))]
    theirs = [torch.nn.Parameter(torch.zeros(p.shape)) for p in ours]
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        p.grad = rng.normal(size=p.shape).astype(np.float32)
        q.grad = torch.tensor(p.grad)
    arrays = [p.grad for p in ours]
    total = nn.utils.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert total == pytest.approx(float(expected), rel=1e-5)
    for p, q, array in zip(ours[:2], theirs[:2], arrays, strict=False):
        assert p.grad is array
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)], ids=str)
def test_clip_grad_norm_sees_nan_in_any_gradient(values: tuple[float, float], norm_type: float) -> None:
    parameters = [nn.Parameter(np.zeros(1, np.float32)) for _ in values]
    for p, value in zip(parameters, values, strict=True):
        p.grad = np.array([value], np.float32)
    assert math.isnan(nn.utils.clip_grad_norm_(parameters, 0.5, norm_type))
    assert all(math.isnan(p.grad[0]) for p in parameters)


def test_clip_grad_norm_without_gradients() -> None:
    assert nn.utils.clip_grad_norm_([nn.Parameter(np.zeros(2))], 1.0) == 0.0

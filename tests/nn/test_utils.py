"""clip_grad_norm_ beside torch's."""

import math

import numpy as np
import pytest

from mpiddp import nn


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("nan", [None, 0, 1])
def test_clip_grad_norm(torch, norm_type: float, max_norm: float, nan: int | None) -> None:
    rng = np.random.default_rng(0)
    ours = [nn.Parameter(np.zeros(s, np.float32)) for s in ((3, 4), (5,), (2,))]
    theirs = [torch.nn.Parameter(torch.zeros(p.shape)) for p in ours]
    for number, (p, q) in enumerate(zip(ours[:2], theirs[:2], strict=True)):
        p.grad = rng.normal(size=p.shape).astype(np.float32)
        if number == nan:
            p.grad.flat[0] = math.nan
        q.grad = torch.tensor(p.grad)
    arrays = [p.grad for p in ours]
    total = nn.utils.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert total == pytest.approx(float(expected), rel=1e-5, nan_ok=True)
    for p, q, array in zip(ours[:2], theirs[:2], arrays, strict=False):
        assert p.grad is array
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-5)


def test_clip_grad_norm_without_gradients() -> None:
    assert nn.utils.clip_grad_norm_([nn.Parameter(np.zeros(2))], 1.0) == 0.0

from __future__ import annotations

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.optim import SGD, AdamW, Optimizer
from mpiddp.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_line_is_learnt(kind: type[Optimizer]) -> None:
    nn.manual_seed(1)
    model = nn.Linear(3, 2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    weight = rng.standard_normal((3, 2)).astype(np.float32)
    options = {"momentum": 0.9} if kind is SGD else {"weight_decay": 0.0}
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg, arg-type]
    schedule = SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=10), CosineAnnealingLR(optimizer, T_max=190)], milestones=[10]
    )
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x @ weight + 1)
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss.item() < 1e-4
    np.testing.assert_allclose(model.weight.data.T, weight, atol=0.01)


def test_a_computed_tensor_is_refused() -> None:
    leaf = Tensor(np.ones(2), requires_grad=True)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        SGD([leaf * 2])

"""Losses: of no samples, of large and many numbers, and warnings of shapes."""

import math

import numpy as np
import pytest
from harness.oracle import draw

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp.autograd import Tensor


def test_losses_of_values_warn_of_other_shapes_as_torchs(torch) -> None:
    """(N, 1) less (N) is (N, N): a regression that learns the mean, without an error."""
    a, b = draw((3, 1), (3,))
    with pytest.warns(UserWarning, match="Using a target size") as ours:
        loss = F.mse_loss(a, b)
    assert ours[0].filename == __file__
    with pytest.warns(UserWarning, match="Using a target size"):
        expected = torch.nn.functional.mse_loss(torch.from_numpy(a), torch.from_numpy(b))
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.filterwarnings("error")
def test_mean_of_no_sample_is_nan_without_a_warning() -> None:
    x = Tensor(np.zeros((0, 3), np.float32), requires_grad=True)
    loss = F.cross_entropy(x, np.zeros(0, np.int64))
    loss.backward()
    assert math.isnan(loss.item()) and x.grad is not None and x.grad.shape == (0, 3)
    assert math.isnan(F.mse_loss(x.data, x.data).item())


def test_losses_refuse_half_precision() -> None:
    """The sum of 70,000 losses is no float16, and neither is their number."""
    x = draw((70_000, 3))[0].astype(np.float16)
    for loss, target in ((F.cross_entropy, np.arange(len(x)) % 3), (F.mse_loss, x)):
        with pytest.raises(TypeError, match=r"float32 or float64, got float16: convert x.astype\('float32'\)"):
            loss(Tensor(x), target)


def test_cross_entropy_does_not_overflow() -> None:
    x = Tensor(np.array([[1000.0, 0.0], [-1000.0, 1000.0]], np.float32), requires_grad=True)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = F.cross_entropy(x, np.array([0, 0]))
        loss.backward()
    assert loss.item() == 1000.0
    np.testing.assert_allclose(x.grad, [[0, 0], [-0.5, 0.5]])

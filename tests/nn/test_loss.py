"""Losses: of no samples, of large and many numbers, and warnings of shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from harness.oracle import draw

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp.autograd import Tensor


def test_losses_of_values_warn_of_other_shapes_as_torchs() -> None:
    """(N, 1) less (N) is (N, N): a regression that learns the mean, without an error."""
    torch = pytest.importorskip("torch")
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


def test_batch_of_ignored_targets_has_no_gradient() -> None:
    x = Tensor(draw((2, 3))[0], requires_grad=True)
    loss = F.cross_entropy(x, np.array([-100, -100]))
    loss.backward()
    assert math.isnan(loss.item())
    np.testing.assert_array_equal(x.grad, np.zeros((2, 3)))  # as torch's


@pytest.mark.filterwarnings("error")
def test_losses_of_many_samples_in_float16() -> None:
    """The sum of so many losses is no float16, and neither is their number."""
    torch = pytest.importorskip("torch")
    x = draw((70_000, 3))[0].astype(np.float16)
    labels = np.arange(len(x)) % 3
    ours, theirs = Tensor(x, requires_grad=True), torch.tensor(x.astype(np.float32), requires_grad=True)
    loss, expected = F.cross_entropy(ours, labels), torch.nn.functional.cross_entropy(theirs, torch.from_numpy(labels))
    loss.backward(np.float16(1024))
    expected.backward(torch.tensor(1024.0))
    assert loss.dtype == np.float16 and loss.item() == pytest.approx(expected.item(), rel=1e-3)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=2e-3, atol=2e-5)


def test_cross_entropy_does_not_overflow() -> None:
    x = Tensor(np.array([[1000.0, 0.0], [-1000.0, 1000.0]], np.float32), requires_grad=True)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = F.cross_entropy(x, np.array([0, 0]))
        loss.backward()
    assert loss.item() == 1000.0
    np.testing.assert_allclose(x.grad, [[0, 0], [-0.5, 0.5]])

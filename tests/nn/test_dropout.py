"""Dropout: what it keeps, where, and in which order."""

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_keeps_the_mean(p: float) -> None:
    x = Tensor(np.full((200, 200), 3.0, np.float32), requires_grad=True)
    y = F.dropout(x, p)
    y.sum().backward()
    kept = y.data != 0
    assert abs(kept.mean() - (1 - p)) < 0.02
    if p < 1:
        np.testing.assert_allclose(y.data[kept], 3 / (1 - p), rtol=1e-6)
    np.testing.assert_allclose(x.grad, y.data / 3, rtol=1e-6)


def test_dropout2d_drops_whole_channels() -> None:
    x = Tensor(np.ones((16, 32, 3, 5), np.float32), requires_grad=True)
    y = F.dropout2d(x, 0.4)
    y.sum().backward()
    assert ((y.data == y.data[:, :, :1, :1]).all()) and abs((y.data == 0).mean() - 0.4) < 0.1
    np.testing.assert_array_equal(x.grad, y.data)


def test_masks_are_drawn_in_the_order_of_memory() -> None:
    masks = []
    for x in (np.ones((6, 5, 4, 3), np.float32), np.ones((5, 4, 3, 6), np.float32).transpose(3, 0, 1, 2)):
        nn.manual_seed(1)
        dropped = F.dropout(x).data
        assert dropped.strides == x.strides
        masks.append(dropped.ravel(order="K"))
    np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize("p", [2.0**-17, 3 * 2.0**-17, 1 - 2.0**-17])
def test_probabilities_are_finer_than_the_bits_of_a_draw(p: float) -> None:
    nn.manual_seed(3)
    n = 1 << 22
    kept = np.count_nonzero(F.dropout(np.ones(n, np.float32), p).data)
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5  # five standard deviations

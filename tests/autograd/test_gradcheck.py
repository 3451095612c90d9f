"""gradcheck finds wrong gradients."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.autograd import Function, gradcheck

from .test_autograd import draw


def test_gradcheck_shows_the_difference() -> None:
    class Wrong(Function):
        def forward(self, x: np.ndarray) -> np.ndarray:
            return x * 2

        def backward(self, grad: np.ndarray) -> np.ndarray:
            result = grad * 2
            result[1, 2] += 5
            return result

    with pytest.raises(AssertionError, match=r"gradient of input 1(?s:.*)Max absolute difference.*: 5"):
        gradcheck(lambda a, b: a + Wrong.apply(b), draw((2, 3), (2, 3)))


def test_gradcheck_sees_nan() -> None:
    class Nan(Function):
        def forward(self, x: np.ndarray) -> np.ndarray:
            return x * 2

        def backward(self, grad: np.ndarray) -> np.ndarray:
            return grad * np.nan

    with pytest.raises(AssertionError):
        gradcheck(Nan.apply, draw((2,)))

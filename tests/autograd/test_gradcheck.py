"""gradcheck finds wrong gradients."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp.autograd import Function, gradcheck

from .test_autograd import draw


@pytest.mark.parametrize("wrong", [5, np.nan])
def test_gradcheck_shows_the_difference(wrong: float) -> None:
    class Wrong(Function):
        def forward(self, x: np.ndarray) -> np.ndarray:
            return x * 2

        def backward(self, grad: np.ndarray) -> np.ndarray:
            result = grad * 2
            result[1, 2] += wrong
            return result

    with pytest.raises(AssertionError, match=r"gradient of input 1(?s:.*)(Max absolute difference.*: 5|nan location)"):
        gradcheck(lambda a, b: a + Wrong.apply(b), draw((2, 3), (2, 3)))

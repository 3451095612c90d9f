"""gradcheck finds wrong gradients."""

import numpy as np
import pytest

from mpiddp.autograd import gradcheck

from .leaves import with_backward
from .test_autograd import draw


@pytest.mark.parametrize("wrong", [5, np.nan])
def test_gradcheck_shows_the_difference(wrong: float) -> None:
    def backward(grad: np.ndarray) -> np.ndarray:
        result = grad * 2
        result[1, 2] += wrong
        return result

    with pytest.raises(AssertionError, match=r"gradient of input 1(?s:.*)(Max absolute difference.*: 5|nan location)"):
        gradcheck(lambda a, b: a + with_backward(backward).apply(b), draw((2, 3), (2, 3)))

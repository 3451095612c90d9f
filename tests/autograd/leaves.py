from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float32), requires_grad=True)


def with_backward(backward: Callable[[np.ndarray], Any]) -> type[Function]:
    """Return a function that is twice the sum of its inputs, and has this backward."""

    class Own(Function):
        def forward(self, *inputs: np.ndarray) -> np.ndarray:
            return 2 * sum(inputs)

        def backward(self, grad: np.ndarray) -> Any:
            return backward(grad)

    return Own

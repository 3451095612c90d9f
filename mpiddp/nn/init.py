"""Initial values by torch's formulas, written in place. All ranks draw the same values from the common seed."""

import math

from mpiddp import moved
from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .random import value_generator


def _fill(tensor: Tensor, values: Array) -> Tensor:
    data = tensor.data
    data[...] = array_namespace(data).asarray(values.astype(data.dtype))
    return tensor


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Fill with values uniform in [a, b)."""
    return _fill(tensor, value_generator().uniform(a, b, tensor.shape))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill with normally distributed values."""
    return _fill(tensor, value_generator().normal(mean, std, tensor.shape))


def default_(weight: Tensor, bias: Tensor | None) -> None:
    """Fill weight (out, in, ...) and bias of a linear layer or convolution as torch does.

    Values are uniform between -1 / sqrt(fan in) and 1 / sqrt(fan in).
    """
    bound = 1 / math.sqrt(max(math.prod(weight.shape[1:]), 1))
    for parameter in (weight, bias):
        if parameter is not None:
            uniform_(parameter, -bound, bound)


moved.explain(__name__)

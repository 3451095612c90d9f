"""Initial values by torch's formulas, written in place, from the seed that all ranks share."""

from __future__ import annotations

import math

import numpy as np

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


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with one value."""
    tensor.data.fill(val)
    return tensor


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with zeros."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with ones."""
    return constant_(tensor, 1.0)


def fans(tensor: Tensor) -> tuple[int, int]:
    """Return fan in and fan out of a weight (out, in, ...)."""
    if tensor.ndim < 2:
        raise ValueError("Fan in and fan out can not be computed for tensor with fewer than 2 dimensions")
    field = int(np.prod(tensor.shape[2:]))
    return tensor.shape[1] * field, tensor.shape[0] * field


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the gain of ``torch.nn.init.calculate_gain``."""
    slope = 0.01 if param is None else param
    gains = {
        "linear": 1.0,
        "conv2d": 1.0,
        "sigmoid": 1.0,
        "tanh": 5 / 3,
        "relu": math.sqrt(2),
        "leaky_relu": math.sqrt(2 / (1 + slope**2)),
        "selu": 3 / 4,
    }
    if nonlinearity not in gains:
        raise ValueError(f"Unsupported nonlinearity {nonlinearity}; expected one of {', '.join(sorted(gains))}")
    return gains[nonlinearity]


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(tensor)[mode == "fan_out"])


def kaiming_uniform_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Fill with He's uniform values (K. He et al., arXiv:1502.01852)."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Fill with He's normal values."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill with Glorot's uniform values (X. Glorot and Y. Bengio, AISTATS 2010)."""
    bound = gain * math.sqrt(6.0 / sum(fans(tensor)))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill with Glorot's normal values."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(fans(tensor))))


def default_(weight: Tensor, bias: Tensor | None) -> None:
    """Fill a linear or convolution layer as torch: uniform within 1 / sqrt(fan in)."""
    kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(fans(weight)[0], 1))
        uniform_(bias, -bound, bound)

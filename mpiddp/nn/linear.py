"""The affine map, as a function and as a layer."""

# mypy: disable-error-code="no-any-return"

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.arithmetic import product
from mpiddp.autograd.function import expect_array_or_option
from mpiddp.device import array_namespace
from mpiddp.typing import Array, DTypeLike

from . import init
from .module import Layer
from .parameter import Parameter


class LinearFunction(Function):
    """``x @ weight.T + bias`` for x (..., in), weight (out, in), bias (out) or None.

    The output of x (N, in) lies in memory as (out, N): OpenBLAS then takes a fifth less time, and convolutions have the
    same layout. The gradient of x has the layout of x.
    """

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        self.shape, self.weight = x.shape, weight
        if x.ndim == 2:
            self.rows = x
            y = product(weight, x.T)  # (out, N)
            if bias is not None:
                y += bias[:, None]
            return y.T
        self.rows = x.reshape(-1, x.shape[-1])  # (N, in)
        y = product(self.rows, weight.T)
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], len(weight))

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        weight, x = self.weight, self.rows
        rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])  # (N, out)
        for_x = None
        if self.needs(0):
            for_x = product(rows, weight) if x.flags.c_contiguous else product(weight.T, rows.T).T
            for_x = for_x.reshape(self.shape)
        return (
            for_x,
            product(rows.T, x, out=self.out(1)) if self.needs(1) else None,
            self._for_bias(rows) if self.needs(2) else None,
        )

    def _for_bias(self, rows: Array) -> Array:
        """Return the sum over rows, by a product with ones, which takes a quarter of the time of ``sum``."""
        ones = array_namespace(rows).ones(len(rows), dtype=rows.dtype)
        return product(ones, rows, out=self.out(2))


def check_dtypes(name: str, input: Any, *weights: Any) -> None:
    """Raise RuntimeError if the input has another dtype than the weights. NumPy would promote one of them silently."""
    for weight in weights:
        if weight is None or input.dtype == weight.dtype:
            continue
        expect_array_or_option(input)
        # An array of float64 is often an accident of NumPy, so the message proposes to convert that array. It does not
        # propose to convert weights to integers.
        promoted = weight.dtype == np.float64 and input.dtype.kind == "f"
        name_of, other = ("weight", input) if promoted else ("x", weight)
        raise RuntimeError(
            f"{name} needs input and weight of one dtype, got {input.dtype} and {weight.dtype}: convert"
            f" {name_of}.astype({str(other.dtype)!r}), or the model by its to()"
        )


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return ``input @ weight.T + bias`` for shapes (..., in), (out, in), and (out) or None."""
    if input.shape[-1] != weight.shape[1]:
        rows = math.prod(input.shape[:-1])
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({rows}x{input.shape[-1]} and {weight.shape[1]}x"
            f"{weight.shape[0]})"
        )
    check_dtypes("linear", input, weight)
    return LinearFunction.apply(input, weight, bias)


class Linear(Layer):
    """Layer of :func:`mpiddp.nn.functional.linear`, from (..., in_features) to (..., out_features)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: DTypeLike = np.float32
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(np.empty((out_features, in_features), dtype))
        self.register_parameter("bias", Parameter(np.empty(out_features, dtype)) if bias else None)
        init.default_(self.weight, self.bias)

    def forward(self, input: Any) -> Tensor:
        return linear(input, self.weight, self.bias)

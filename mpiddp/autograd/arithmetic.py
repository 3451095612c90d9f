"""Elementwise operations and matrix products, with NumPy's broadcasting; a Python number has the empty shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.conversion import Conversion
from mpiddp.device.half import assign, converted, is_half, sum_dtype, widened
from mpiddp.device.place import place_of
from mpiddp.typing import Array

from .function import Function, shape_of, unbroadcast

Gradients = tuple[Array | None, ...]
_NUMBERS = int, float, complex, np.number


class Add(Function):
    def forward(self, a: Any, b: Any) -> Any:
        self.shapes = shape_of(a), shape_of(b)
        return a + b

    def backward(self, grad: Array) -> Gradients:
        a, b = self.shapes
        return unbroadcast(grad, a) if self.needs(0) else None, unbroadcast(grad, b) if self.needs(1) else None


class Subtract(Function):
    def forward(self, a: Any, b: Any) -> Any:
        self.shapes = shape_of(a), shape_of(b)
        return a - b

    def backward(self, grad: Array) -> Gradients:
        a, b = self.shapes
        return unbroadcast(grad, a) if self.needs(0) else None, unbroadcast(-grad, b) if self.needs(1) else None


class Multiply(Function):
    def forward(self, a: Any, b: Any) -> Any:
        self.a, self.b = a, b
        return a * b

    def backward(self, grad: Array) -> Gradients:
        a, b = self.a, self.b
        return (
            unbroadcast(grad * b, shape_of(a)) if self.needs(0) else None,
            unbroadcast(grad * a, shape_of(b)) if self.needs(1) else None,
        )


class Divide(Function):
    def forward(self, a: Any, b: Any) -> Any:
        self.a, self.b = a, b
        return a / b

    def backward(self, grad: Array) -> Gradients:
        a, b = self.a, self.b
        return (
            unbroadcast(grad / b, shape_of(a)) if self.needs(0) else None,
            unbroadcast(-grad * (a / b) / b, shape_of(b)) if self.needs(1) else None,
        )


class Power(Function):
    """The gradient of an exponent is 0 where the base is 0, as torch's."""

    def forward(self, a: Any, b: Any) -> Any:
        self.a, self.b = a, b
        self.result = a**b
        return self.result

    def backward(self, grad: Array) -> Gradients:
        a, b = self.a, self.b
        xp = array_namespace(grad)
        for_base = for_exponent = None
        if self.needs(0):
            # not 0 ** -1, which is infinite
            slope = b * a ** (b - (b != 0))
            for_base = unbroadcast((grad * slope).astype(a.dtype, copy=False), a.shape)
        if self.needs(1):
            logarithm = (
                np.log(a or 1).item() if isinstance(a, _NUMBERS) else xp.log(xp.where(a == 0, xp.ones_like(a), a))
            )
            for_exponent = unbroadcast(grad * self.result * logarithm, b.shape)
        return for_base, for_exponent


class Negative(Function):
    def forward(self, a: Array) -> Any:
        return -a

    def backward(self, grad: Array) -> Array:
        return -grad


class Absolute(Function):
    """The gradient at 0 is 0."""

    def forward(self, a: Array) -> Any:
        self.a = a
        return abs(a)

    def backward(self, grad: Array) -> Any:
        return grad * array_namespace(grad).sign(self.a)


class Exponential(Function):
    def forward(self, a: Array) -> Any:
        self.result = array_namespace(a).exp(a)
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad * self.result


class Logarithm(Function):
    def forward(self, a: Array) -> Any:
        self.a = a
        return array_namespace(a).log(a)

    def backward(self, grad: Array) -> Any:
        return grad / self.a


class SquareRoot(Function):
    def forward(self, a: Array) -> Any:
        self.result = array_namespace(a).sqrt(a)
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad / (2 * self.result)


class Deviation(SquareRoot):
    """The square root of a variance; the gradient at 0 is 0, as torch's."""

    def backward(self, grad: Array) -> Any:
        no_slope = self.result.dtype.type(math.inf)
        return grad / array_namespace(grad).where(self.result == 0, no_slope, 2 * self.result)


class Tanh(Function):
    def forward(self, a: Array) -> Any:
        self.result = array_namespace(a).tanh(a)
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad * (1 - self.result * self.result)


class Sigmoid(Function):
    """By tanh, which cannot overflow."""

    def forward(self, a: Array) -> Any:
        self.result = (array_namespace(a).tanh(a / 2) + 1) / 2  # by 0.5 bfloat16 would become float32
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad * self.result * (1 - self.result)


class ReLU(Function):
    """The gradient at 0 is 0."""

    def forward(self, x: Array) -> Any:
        self.result = array_namespace(x).maximum(x, 0)
        return self.result

    def backward(self, grad: Array) -> Any:
        return grad * (self.result > 0)


class Sine(Function):
    def forward(self, a: Array) -> Any:
        self.a = a
        return array_namespace(a).sin(a)

    def backward(self, grad: Array) -> Any:
        return grad * array_namespace(grad).cos(self.a)


class Cosine(Function):
    def forward(self, a: Array) -> Any:
        self.a = a
        return array_namespace(a).cos(a)

    def backward(self, grad: Array) -> Any:
        return -grad * array_namespace(grad).sin(self.a)


class Maximum(Function):
    """Equal values share the gradient."""

    sign = 1

    def forward(self, a: Any, b: Any) -> Any:
        self.a, self.b = a, b
        xp = array_namespace(a)
        return xp.maximum(a, b) if self.sign > 0 else xp.minimum(a, b)

    def backward(self, grad: Array) -> Gradients:
        a, b = self.a, self.b
        half = (a == b).astype(grad.dtype) / 2
        a_loses, b_loses = (a < b, a > b) if self.sign > 0 else (a > b, a < b)
        return (
            unbroadcast(grad * (1 - half - a_loses), shape_of(a)) if self.needs(0) else None,
            unbroadcast(grad * (1 - half - b_loses), shape_of(b)) if self.needs(1) else None,
        )


class Minimum(Maximum):
    sign = -1


class Clamp(Function):
    """``a`` limited to [low, high], each a number or None; the gradient at a limit is 1."""

    def forward(self, a: Array, low: float | None, high: float | None) -> Any:
        self.a, self.low, self.high = a, low, high
        return array_namespace(a).clip(a, low, high)

    def backward(self, grad: Array) -> Any:
        xp = array_namespace(grad)
        inside = xp.ones(grad.shape, dtype=bool)
        if self.low is not None:
            inside &= self.a >= self.low
        if self.high is not None:
            inside &= self.a <= self.high
        return xp.where(inside, grad, xp.zeros_like(grad))


class Where(Function):
    def forward(self, condition: Array, a: Any, b: Any) -> Any:
        self.condition, self.shapes = condition, (shape_of(a), shape_of(b))
        return array_namespace(condition).where(condition, a, b)

    def backward(self, grad: Array) -> Gradients:
        xp = array_namespace(grad)
        zero = xp.zeros_like(grad)
        a, b = self.shapes
        return (
            None,
            unbroadcast(xp.where(self.condition, grad, zero), a) if self.needs(1) else None,
            unbroadcast(xp.where(self.condition, zero, grad), b) if self.needs(2) else None,
        )


class Convert(Function):
    """``a`` with another device or dtype."""

    def forward(self, a: Array, convert: Conversion) -> Array:
        self.back = Conversion("kept" if convert.place == "kept" else place_of(a), a.dtype)
        return convert(a)

    def backward(self, grad: Array) -> Array:
        return self.back(grad)


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``, into ``out`` if given; half precision on the host is computed in float32 and rounded.

    NumPy multiplies float16 in a plain loop, and bfloat16 to float32; CuPy 14 has no kernel for stacks of bfloat16.
    """
    xp = array_namespace(a)
    if not (is_half(a) or is_half(b)) or (is_device_array(a) and not _is_of_bfloat16_stacks(a, b)):
        return xp.matmul(a, b, out=out)  # type: ignore[no-any-return]
    wide = xp.matmul(widened(a), widened(b))
    if out is None:
        return converted(wide, a.dtype) if a.dtype == b.dtype else wide
    assign(out, wide)
    return out


def _is_of_bfloat16_stacks(a: Array, b: Array) -> bool:
    return max(a.ndim, b.ndim) > 2 and "V" in (a.dtype.kind, b.dtype.kind)


def total(a: Array, axis: int, out: Array | None = None) -> Array:
    """Return the sum along an axis; of half precision a float32."""
    return array_namespace(a).add.reduce(a, axis=axis, dtype=sum_dtype(a), out=out)  # type: ignore[no-any-return]


class MatMul(Function):
    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return product(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, Array | None]:
        a, b = self.a, self.b
        if a.ndim == 2 and b.ndim == 2:
            return (
                product(grad, b.T, out=self.out(0)) if self.needs(0) else None,
                product(a.T, grad, out=self.out(1)) if self.needs(1) else None,
            )
        left = a[None, :] if a.ndim == 1 else a  # (..., n, k)
        right = b[:, None] if b.ndim == 1 else b  # (..., k, m)
        if b.ndim == 1:
            grad = grad[..., None]
        if a.ndim == 1:
            grad = grad[..., None, :]
        for_a = for_b = None
        if self.needs(0):
            for_a = unbroadcast(product(grad, right.swapaxes(-1, -2)), left.shape).reshape(a.shape)
        if self.needs(1):
            if right.ndim == 2:
                # The sum over the stack is part of the product.
                rows = math.prod(left.shape[:-1])
                stacked, grads = left.reshape(rows, left.shape[-1]), grad.reshape(rows, grad.shape[-1])
                for_b = product(stacked.T, grads).reshape(b.shape)
            else:
                for_b = unbroadcast(product(left.swapaxes(-1, -2), grad), right.shape).reshape(b.shape)
        return for_a, for_b

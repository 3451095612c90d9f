"""Elementwise functions, comparisons and matrix products.

Operands broadcast as in NumPy; a Python number has the empty shape.
"""

# mypy: disable-error-code="no-any-return"
# (Function.apply is typed Any: nodes of the tape are below the tensor and cannot name its type.)

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.typing import Array, Shape

from .function import Function, Variable, constant, unbroadcast, values_of

Operand = Any
"""A tensor, an array or a number."""
Gradients = tuple[Array | None, ...]
_T = TypeVar("_T", bound=Variable)
_NUMBERS = int, float, complex, np.number


def _shape_of(operand: Any) -> Shape:
    return getattr(operand, "shape", ())


class _OfOne(Function):
    value: ClassVar[Any]
    gradient: ClassVar[Any]
    of_result: ClassVar[bool]

    def forward(self, a: Array) -> Any:
        result = self.value(array_namespace(a), a)
        self.kept = result if self.of_result else a
        return result

    def backward(self, grad: Array) -> Any:
        return self.gradient(grad, self.kept)


def _of_one(
    name: str, value: Callable[[Any, Array], Any], gradient: Callable[..., Any], of_result: bool = True
) -> type[Function]:
    """Return the function ``value(xp, a)`` with the gradient ``gradient(grad, y)``.

    ``y`` is the result of the function if ``of_result``, else ``a``.
    """
    members = {"value": staticmethod(value), "gradient": staticmethod(gradient), "of_result": of_result}
    return type(name, (_OfOne,), members)


Negative = _of_one("Negative", lambda xp, a: -a, lambda grad, y: -grad)
Exponential = _of_one("Exponential", lambda xp, a: xp.exp(a), lambda grad, y: grad * y)
SquareRoot = _of_one("SquareRoot", lambda xp, a: xp.sqrt(a), lambda grad, y: grad / (2 * y))
Tanh = _of_one("Tanh", lambda xp, a: xp.tanh(a), lambda grad, y: grad * (1 - y * y))
# The formula with tanh cannot overflow, unlike one with exp.
Sigmoid = _of_one("Sigmoid", lambda xp, a: (xp.tanh(a / 2) + 1) / 2, lambda grad, y: grad * y * (1 - y))
ReLU = _of_one("ReLU", lambda xp, a: xp.maximum(a, 0), lambda grad, y: grad * (y > 0))
Absolute = _of_one("Absolute", lambda xp, a: abs(a), lambda grad, a: grad * array_namespace(a).sign(a), of_result=False)
Logarithm = _of_one("Logarithm", lambda xp, a: xp.log(a), lambda grad, a: grad / a, of_result=False)


class _OfTwo(Function):
    value: ClassVar[Any]
    gradients: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]
    linear: ClassVar[bool]

    def forward(self, a: Any, b: Any) -> Any:
        self.shapes = _shape_of(a), _shape_of(b)
        self.operands = () if self.linear else (a, b)
        return self.value(a, b)

    def backward(self, grad: Array) -> Gradients:
        (for_a, for_b), (a, b) = self.gradients, self.shapes
        return (
            unbroadcast(for_a(grad, *self.operands), a) if self.needs(0) else None,
            unbroadcast(for_b(grad, *self.operands), b) if self.needs(1) else None,
        )


def _of_two(
    name: str, value: Callable[..., Any], for_a: Callable[..., Any], for_b: Callable[..., Any], linear: bool = False
) -> type[Function]:
    """Return the function ``value(a, b)``, whose gradients are ``for_a(grad, a, b)`` and ``for_b(grad, a, b)``.

    The gradients of a ``linear`` function get only ``grad``, so the function keeps no operand.
    """
    return type(name, (_OfTwo,), {"value": staticmethod(value), "gradients": (for_a, for_b), "linear": linear})


def _for_base(grad: Array, a: Any, b: Any) -> Array:
    slope = b * a ** (b - (b != 0))  # the exponent b - 1, but 0 for b = 0: 0 ** -1 is infinite
    return (grad * slope).astype(a.dtype, copy=False)


def _for_exponent(grad: Array, a: Any, b: Any) -> Any:
    """Return the gradient of the exponent ``b``. It is 0 where the base is 0 and ``b`` is not negative, as in torch."""
    xp = array_namespace(grad)
    one_for_zero = a or 1 if isinstance(a, _NUMBERS) else xp.where(a == 0, xp.ones_like(a), a)
    return grad * a**b * (np.log(one_for_zero).item() if isinstance(a, _NUMBERS) else xp.log(one_for_zero))


Add = _of_two("Add", operator.add, lambda grad: grad, lambda grad: grad, linear=True)
Subtract = _of_two("Subtract", operator.sub, lambda grad: grad, lambda grad: -grad, linear=True)
Multiply = _of_two("Multiply", operator.mul, lambda grad, a, b: grad * b, lambda grad, a, b: grad * a)
Divide = _of_two("Divide", operator.truediv, lambda grad, a, b: grad / b, lambda grad, a, b: -grad * (a / b) / b)
Power = _of_two("Power", operator.pow, _for_base, _for_exponent)


class Where(Function):
    def forward(self, condition: Array, a: Any, b: Any) -> Any:
        self.condition, self.shapes = condition, (_shape_of(a), _shape_of(b))
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


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``, into ``out`` if given."""
    return array_namespace(a).matmul(a, b, out=out)


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
            for_b = unbroadcast(product(left.swapaxes(-1, -2), grad), right.shape).reshape(b.shape)
        return for_a, for_b


def _operator(function: type[Function]) -> Callable[[_T, Operand], _T]:
    """Return the method that applies a function to a tensor and the other operand."""
    return lambda self, other: function.apply(self, other)


def _reflected(function: type[Function]) -> Callable[[_T, Operand], _T]:
    return lambda self, other: function.apply(other, self)


def _constant(function: Callable[[Any, Any], Any]) -> Callable[[_T, Operand], _T]:
    """Return the method that applies a function to the arrays of both operands. The tape does not record it."""
    return lambda self, other: constant(function(self.data, values_of(other)))


class Arithmetic(Variable):
    """Arithmetic and comparisons of a tensor. Comparisons have no gradient."""

    __add__ = __radd__ = _operator(Add)
    __sub__, __rsub__ = _operator(Subtract), _reflected(Subtract)
    __mul__ = __rmul__ = _operator(Multiply)
    __truediv__, __rtruediv__ = _operator(Divide), _reflected(Divide)
    __pow__, __rpow__ = _operator(Power), _reflected(Power)
    __matmul__, __rmatmul__ = _operator(MatMul), _reflected(MatMul)

    def __neg__(self) -> Self:
        return Negative.apply(self)

    def __abs__(self) -> Self:
        return Absolute.apply(self)

    def abs(self) -> Self:
        """Return absolute values; the gradient at 0 is 0."""
        return Absolute.apply(self)

    def sqrt(self) -> Self:
        """Return square roots."""
        return SquareRoot.apply(self)

    def exp(self) -> Self:
        """Return exponentials."""
        return Exponential.apply(self)

    def log(self) -> Self:
        """Return natural logarithms."""
        return Logarithm.apply(self)

    def tanh(self) -> Self:
        """Return hyperbolic tangents."""
        return Tanh.apply(self)

    def sigmoid(self) -> Self:
        """Return ``1 / (1 + exp(-self))``."""
        return Sigmoid.apply(self)

    def relu(self) -> Self:
        """Return ``max(self, 0)``; the gradient at 0 is 0."""
        return ReLU.apply(self)

    __eq__ = _constant(operator.eq)  # type: ignore[assignment]
    __ne__ = _constant(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _constant(operator.lt), _constant(operator.le)
    __gt__, __ge__ = _constant(operator.gt), _constant(operator.ge)
    __and__, __or__ = _constant(operator.and_), _constant(operator.or_)

    def __invert__(self) -> Self:
        return constant(~self.data)

    # Python sets __hash__ to None in a class that defines __eq__.
    __hash__ = object.__hash__

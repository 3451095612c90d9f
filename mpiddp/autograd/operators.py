"""The operators and methods of a tensor through which gradients flow, and those that compare and search.

Imports the operations of the tape. Methods have torch's names and argument names; ``@`` and broadcasting are NumPy's.
"""
# mypy: disable-error-code="no-any-return"
# (Function.apply is typed Any: the nodes of the tape are below the tensor and cannot name its type.)

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.lib.array_utils import normalize_axis_index

from mpiddp.device import array_namespace
from mpiddp.typing import Array, DTypeLike, Shape

from . import arithmetic, reduction, shaping
from .function import Function
from .matmul import MatMul
from .reduction import Dim
from .variable import Variable

if TYPE_CHECKING:
    from .tensor import Tensor

Operand = Any
"""A tensor, an array or a number."""


class Operators(Variable):
    """What :class:`mpiddp.autograd.Tensor` is computed with: each method is one operation of the tape, or a few.

    Comparisons and indices have no gradient: what they return is a tensor that the tape does not know.
    """

    # NumPy hands `array + tensor` to __radd__.
    __array_ufunc__ = None
    # Python takes it away from a class that defines __eq__.
    __hash__ = object.__hash__

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Tensor:
        return arithmetic.Add.apply(self, other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Tensor:
        return arithmetic.Subtract.apply(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return arithmetic.Subtract.apply(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return arithmetic.Multiply.apply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Tensor:
        return arithmetic.Divide.apply(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return arithmetic.Divide.apply(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return arithmetic.Power.apply(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return arithmetic.Power.apply(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return MatMul.apply(self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return MatMul.apply(other, self)

    def __neg__(self) -> Tensor:
        return arithmetic.Negative.apply(self)

    def __abs__(self) -> Tensor:
        return arithmetic.Absolute.apply(self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _constant(self.data == _values(other))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _constant(self.data != _values(other))

    def __lt__(self, other: Operand) -> Tensor:
        return _constant(self.data < _values(other))

    def __le__(self, other: Operand) -> Tensor:
        return _constant(self.data <= _values(other))

    def __gt__(self, other: Operand) -> Tensor:
        return _constant(self.data > _values(other))

    def __ge__(self, other: Operand) -> Tensor:
        return _constant(self.data >= _values(other))

    def eq(self, other: Operand) -> Tensor:
        """Return where the values are equal, as booleans."""
        return self == other

    def pow(self, exponent: Operand) -> Tensor:
        """Return ``self ** exponent``."""
        return arithmetic.Power.apply(self, exponent)

    def matmul(self, other: Operand) -> Tensor:
        """Return ``self @ other``."""
        return MatMul.apply(self, other)

    def abs(self) -> Tensor:
        """Return the absolute values."""
        return arithmetic.Absolute.apply(self)

    def exp(self) -> Tensor:
        """Return the exponentials."""
        return arithmetic.Exponential.apply(self)

    def log(self) -> Tensor:
        """Return the natural logarithms."""
        return arithmetic.Logarithm.apply(self)

    def sqrt(self) -> Tensor:
        """Return the square roots."""
        return arithmetic.SquareRoot.apply(self)

    def sin(self) -> Tensor:
        """Return the sines."""
        return arithmetic.Sine.apply(self)

    def cos(self) -> Tensor:
        """Return the cosines."""
        return arithmetic.Cosine.apply(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangents."""
        return arithmetic.Tanh.apply(self)

    def sigmoid(self) -> Tensor:
        """Return the logistic function of the values."""
        return arithmetic.Sigmoid.apply(self)

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """Return the values limited to [min, max]."""
        return arithmetic.Clamp.apply(self, min, max)

    def to(self, dtype: DTypeLike) -> Tensor:
        """Return the values with another dtype; gradients come back with the first one's."""
        if self.data.dtype == dtype:
            return self  # type: ignore[return-value]  # nobody is an Operators without being a Tensor
        return arithmetic.Cast.apply(self, dtype)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Return the values with another dtype: NumPy's word for :meth:`to`."""
        return self.to(dtype)

    def float(self) -> Tensor:
        """Return the values as float32."""
        return self.to("float32")

    def clone(self) -> Tensor:
        """Return a copy through which gradients flow."""
        return shaping.Copy.apply(self)

    # -- reductions ------------------------------------------------------------------------------------------------

    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the sum over axes, all of them by default."""
        return reduction.Sum.apply(self, dim, keepdim)

    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the mean over axes, all of them by default."""
        return reduction.Mean.apply(self, dim, keepdim)

    def var(self, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
        """Return the variance over axes, divided by the number of elements less ``correction``."""
        squares = (self - self.mean(dim, keepdim=True)) ** 2
        count = reduction.reduced(self.data.shape, dim)
        mean = squares.mean(dim, keepdim)
        # A float of Python would make bfloat16 float32.
        return mean * mean.data.dtype.type(count / (count - correction) if count > correction else math.inf)

    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the largest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, 1)

    def amin(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the smallest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, -1)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the largest value; with ``dim``, as torch, the :class:`ValuesAndIndices` along that axis."""
        return self.amax() if dim is None else self._at(self.data.argmax(axis=dim, keepdims=True), dim, keepdim)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the smallest value; with ``dim``, as torch, the :class:`ValuesAndIndices` along that axis."""
        return self.amin() if dim is None else self._at(self.data.argmin(axis=dim, keepdims=True), dim, keepdim)

    def _at(self, index: Array, dim: int, keepdim: bool) -> ValuesAndIndices:
        """Return the elements at ``index`` along ``dim``, and the index."""
        values = reduction.TakeAlong.apply(self, index, dim)
        return (
            ValuesAndIndices(values, _constant(index))
            if keepdim
            else ValuesAndIndices(values.squeeze(dim), _constant(index.squeeze(dim)))
        )

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return where the largest values are along an axis, or in the flattened tensor."""
        return _constant(array_namespace(self.data).argmax(self.data, axis=dim, keepdims=keepdim))

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return where the smallest values are along an axis, or in the flattened tensor."""
        return _constant(array_namespace(self.data).argmin(self.data, axis=dim, keepdims=keepdim))

    def cumsum(self, dim: int) -> Tensor:
        """Return the running sums along an axis."""
        return reduction.CumulativeSum.apply(self, dim)

    # -- shape -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):
            index = tuple(_values(part) for part in index)
        return shaping.Index.apply(self, _values(index))

    def reshape(self, *shape: Any) -> Tensor:
        """Return the values in another shape, given as numbers or as one tuple; one length may be -1."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def view(self, *shape: Any) -> Tensor:
        """Return the values in another shape; unlike torch's, copies where the layout demands it."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Return the tensor with the axes from ``start_dim`` to ``end_dim`` made one."""
        shape = self.data.shape or (1,)
        first, last = (normalize_axis_index(dim, len(shape)) for dim in (start_dim, end_dim))
        if first > last:
            raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
        return shaping.Reshape.apply(self, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))

    def squeeze(self, dim: int | None = None) -> Tensor:
        """Return the tensor without its axes of length 1, or without that one if its length is 1."""
        shape = self.data.shape
        gone = range(len(shape)) if dim is None else (normalize_axis_index(dim, len(shape) or 1),)
        return self.reshape(tuple(n for i, n in enumerate(shape) if n != 1 or i not in gone))

    def unsqueeze(self, dim: int) -> Tensor:
        """Return the tensor with an axis of length 1 at ``dim``."""
        shape = list(self.data.shape)
        shape.insert(normalize_axis_index(dim, len(shape) + 1), 1)
        return self.reshape(tuple(shape))

    @property
    def T(self) -> Tensor:  # noqa: N802 (NumPy's and torch's name)
        """The axes in reverse order."""
        return shaping.Transpose.apply(self, tuple(range(self.data.ndim))[::-1])

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Return the tensor with two axes exchanged."""
        axes = list(range(self.data.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return shaping.Transpose.apply(self, tuple(axes))

    def permute(self, *dims: Any) -> Tensor:
        """Return the tensor with its axes in the order ``dims``."""
        return shaping.Transpose.apply(self, _lengths(dims))

    def expand(self, *shape: Any) -> Tensor:
        """Return the tensor repeated along axes of length 1, without a copy; -1 keeps an axis."""
        return shaping.Expand.apply(self, _lengths(shape))


class ValuesAndIndices(NamedTuple):
    """What ``max`` and ``min`` along an axis return."""

    values: Tensor
    indices: Tensor


def _constant(array: Array) -> Tensor:
    """Return a tensor that the tape does not know."""
    return Function.output_type(array)


def _values(operand: Any) -> Any:
    """Return a tensor's array, and anything else as it is."""
    return operand.data if isinstance(operand, Variable) else operand


def _lengths(numbers: tuple[Any, ...]) -> Shape:
    """Return ``f(2, 3)``'s and ``f((2, 3))``'s arguments alike."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], tuple | list) else numbers

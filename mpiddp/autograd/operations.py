"""Operations of a tensor: torch's methods and argument names, NumPy's broadcasting; comparisons have no gradient."""
# mypy: disable-error-code="no-any-return"
# (Function.apply is typed Any: nodes of the tape are below the tensor and cannot name its type.)

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from mpiddp.device import array_namespace
from mpiddp.device.conversion import conversion
from mpiddp.typing import Array, DTypeLike, Shape

from . import arithmetic, reduction, shaping
from .function import Function, Variable, is_differentiable, mode
from .reduction import Dim

Operand = Any


class ElementCount(int):
    """Number of elements; called, as torch's ``size``, the shape or one length."""

    shape: Shape

    def __new__(cls, shape: Shape) -> ElementCount:
        count = super().__new__(cls, math.prod(shape))
        count.shape = shape
        return count

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[normalize_axis_index(dim, len(self.shape))]


class ValuesAndIndices(NamedTuple):
    """Values and their positions along an axis."""

    values: Any
    indices: Any


class Operations(Variable):
    # -- arithmetic ------------------------------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Self:
        return arithmetic.Add.apply(self, other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Self:
        return arithmetic.Subtract.apply(self, other)

    def __rsub__(self, other: Operand) -> Self:
        return arithmetic.Subtract.apply(other, self)

    def __mul__(self, other: Operand) -> Self:
        return arithmetic.Multiply.apply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Self:
        return arithmetic.Divide.apply(self, other)

    def __rtruediv__(self, other: Operand) -> Self:
        return arithmetic.Divide.apply(other, self)

    def __pow__(self, other: Operand) -> Self:
        return arithmetic.Power.apply(self, other)

    def __rpow__(self, other: Operand) -> Self:
        return arithmetic.Power.apply(other, self)

    def __matmul__(self, other: Operand) -> Self:
        return arithmetic.MatMul.apply(self, other)

    def __rmatmul__(self, other: Operand) -> Self:
        return arithmetic.MatMul.apply(other, self)

    def __neg__(self) -> Self:
        return arithmetic.Negative.apply(self)

    def __abs__(self) -> Self:
        return arithmetic.Absolute.apply(self)

    def add(self, other: Operand, *, alpha: float = 1) -> Self:
        """Return ``self + alpha * other``."""
        return self + (other if alpha == 1 else alpha * other)

    def sub(self, other: Operand, *, alpha: float = 1) -> Self:
        """Return ``self - alpha * other``."""
        return self - (other if alpha == 1 else alpha * other)

    def mul(self, other: Operand) -> Self:
        """Return ``self * other``."""
        return self * other

    def div(self, other: Operand) -> Self:
        """Return ``self / other``."""
        return self / other

    def neg(self) -> Self:
        """Return ``-self``."""
        return -self

    def pow(self, exponent: Operand) -> Self:
        """Return ``self ** exponent``."""
        return arithmetic.Power.apply(self, exponent)

    def matmul(self, other: Operand) -> Self:
        """Return ``self @ other``."""
        return arithmetic.MatMul.apply(self, other)

    def abs(self) -> Self:
        """Return absolute values."""
        return arithmetic.Absolute.apply(self)

    def square(self) -> Self:
        """Return squares."""
        return self * self

    def sqrt(self) -> Self:
        """Return square roots."""
        return arithmetic.SquareRoot.apply(self)

    def exp(self) -> Self:
        """Return exponentials."""
        return arithmetic.Exponential.apply(self)

    def log(self) -> Self:
        """Return natural logarithms."""
        return arithmetic.Logarithm.apply(self)

    def sin(self) -> Self:
        """Return sines."""
        return arithmetic.Sine.apply(self)

    def cos(self) -> Self:
        """Return cosines."""
        return arithmetic.Cosine.apply(self)

    def tanh(self) -> Self:
        """Return hyperbolic tangents."""
        return arithmetic.Tanh.apply(self)

    def sigmoid(self) -> Self:
        """Return ``1 / (1 + exp(-self))``."""
        return arithmetic.Sigmoid.apply(self)

    def relu(self) -> Self:
        """Return ``max(self, 0)``; the gradient at 0 is 0."""
        return arithmetic.ReLU.apply(self)

    def clamp(self, min: float | None = None, max: float | None = None) -> Self:
        """Return values limited to [min, max]."""
        return arithmetic.Clamp.apply(self, min, max)

    def masked_fill(self, mask: Operand, value: Operand) -> Self:
        """Return ``value`` where the boolean ``mask`` holds, else the tensor's values."""
        mask = values_of(mask)
        if mask.dtype != bool:
            raise RuntimeError(f"masked_fill only supports boolean masks, but got mask with dtype {mask.dtype}")
        return arithmetic.Where.apply(mask, value, self)

    # -- comparisons -----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        return constant(self.data == values_of(other))

    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        return constant(self.data != values_of(other))

    def __lt__(self, other: Operand) -> Self:
        return constant(self.data < values_of(other))

    def __le__(self, other: Operand) -> Self:
        return constant(self.data <= values_of(other))

    def __gt__(self, other: Operand) -> Self:
        return constant(self.data > values_of(other))

    def __ge__(self, other: Operand) -> Self:
        return constant(self.data >= values_of(other))

    def __and__(self, other: Operand) -> Self:
        return constant(self.data & values_of(other))

    def __or__(self, other: Operand) -> Self:
        return constant(self.data | values_of(other))

    def __invert__(self) -> Self:
        return constant(~self.data)

    # Defining __eq__ removes it.
    __hash__ = object.__hash__

    def eq(self, other: Operand) -> Self:
        """Return where ``self == other``."""
        return self == other

    def ne(self, other: Operand) -> Self:
        """Return where ``self != other``."""
        return self != other

    def lt(self, other: Operand) -> Self:
        """Return where ``self < other``."""
        return self < other

    def le(self, other: Operand) -> Self:
        """Return where ``self <= other``."""
        return self <= other

    def gt(self, other: Operand) -> Self:
        """Return where ``self > other``."""
        return self > other

    def ge(self, other: Operand) -> Self:
        """Return where ``self >= other``."""
        return self >= other

    # -- reductions ------------------------------------------------------------------------------------------------

    def sum(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the sum over axes, by default all."""
        return reduction.Sum.apply(self, dim, keepdim)

    def mean(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the mean over axes, by default all."""
        return reduction.Mean.apply(self, dim, keepdim)

    def var(self, dim: Dim = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1) -> Self:
        """Return the variance, divided by the number of elements less ``correction``, 0 if not ``unbiased``."""
        correction = correction if unbiased else 0
        squares = (self - self.mean(dim, keepdim=True)) ** 2
        count = reduction.reduced(self.data.shape, dim)
        mean = squares.mean(dim, keepdim)
        # A Python float would make bfloat16 float32.
        return mean * mean.data.dtype.type(count / (count - correction) if count > correction else math.inf)

    def std(self, dim: Dim = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1) -> Self:
        """Return the square root of :meth:`var`."""
        return arithmetic.Deviation.apply(self.var(dim, unbiased, keepdim, correction=correction))

    def softmax(self, dim: int) -> Self:
        """Return exponentials scaled to sum to 1 along ``dim``."""
        return reduction.Softmax.apply(self, dim)

    def log_softmax(self, dim: int) -> Self:
        """Return the logarithm of :meth:`softmax`, without overflow."""
        return reduction.LogSoftmax.apply(self, dim)

    def amax(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the largest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, 1)

    def amin(self, dim: Dim = None, keepdim: bool = False) -> Self:
        """Return the smallest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, -1)

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest value, `ValuesAndIndices` along ``dim``, or the larger of two tensors."""
        if dim is None or isinstance(dim, int):
            return self.amax() if dim is None else self._at(self.data.argmax(axis=dim, keepdims=True), dim, keepdim)
        return arithmetic.Maximum.apply(self, dim)

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the smallest value, `ValuesAndIndices` along ``dim``, or the smaller of two tensors."""
        if dim is None or isinstance(dim, int):
            return self.amin() if dim is None else self._at(self.data.argmin(axis=dim, keepdims=True), dim, keepdim)
        return arithmetic.Minimum.apply(self, dim)

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesAndIndices:
        """Return the ``k`` largest or smallest values along an axis, in order, with their indices."""
        x = self.data
        axis, length = normalize_axis_index(dim, x.ndim), x.shape[dim]
        if not 0 <= k <= length:
            raise RuntimeError(f"selected index k out of range: k={k} for an axis of length {length}")
        xp = array_namespace(x)
        if largest:  # reversed twice: equal values in order, NaN first
            order = length - 1 - xp.flip(xp.argsort(xp.flip(x, axis), axis=axis, kind="stable"), axis)
        else:
            order = xp.argsort(x, axis=axis, kind="stable")
        return self._at(xp.take(order, xp.arange(k), axis=axis), axis, True)

    def _at(self, index: Array, dim: int, keepdim: bool) -> ValuesAndIndices:
        values = reduction.TakeAlong.apply(self, index, dim)
        if keepdim:
            return ValuesAndIndices(values, constant(index))
        return ValuesAndIndices(values.squeeze(dim), constant(index.squeeze(dim)))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the largest value along an axis, or of all."""
        return constant(array_namespace(self.data).argmax(self.data, axis=dim, keepdims=keepdim))

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the smallest value along an axis, or of all."""
        return constant(array_namespace(self.data).argmin(self.data, axis=dim, keepdims=keepdim))

    def cumsum(self, dim: int) -> Self:
        """Return running sums along an axis."""
        return reduction.CumulativeSum.apply(self, dim)

    # -- shape -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Self:
        if isinstance(index, tuple):
            index = tuple(values_of(part) for part in index)
        return shaping.Index.apply(self, values_of(index))

    def reshape(self, *shape: Any) -> Self:
        """Return the values in another shape; one length may be -1."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def view(self, *shape: Any) -> Self:
        """Return the values in another shape; unlike torch's, may copy."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def view_as(self, other: Operand) -> Self:
        """Return the values in the shape of ``other``."""
        return self.view(tuple(other.shape))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Join the axes from ``start_dim`` to ``end_dim``."""
        shape = self.data.shape or (1,)
        first, last = (normalize_axis_index(dim, len(shape)) for dim in (start_dim, end_dim))
        if first > last:
            raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
        return shaping.Reshape.apply(self, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))

    def squeeze(self, dim: int | None = None) -> Self:
        """Remove the axes of length 1, or only ``dim``."""
        shape = self.data.shape
        gone = range(len(shape)) if dim is None else (normalize_axis_index(dim, len(shape) or 1),)
        return self.reshape(tuple(n for i, n in enumerate(shape) if n != 1 or i not in gone))

    def unsqueeze(self, dim: int) -> Self:
        """Add an axis of length 1 at ``dim``."""
        shape = list(self.data.shape)
        shape.insert(normalize_axis_index(dim, len(shape) + 1), 1)
        return self.reshape(tuple(shape))

    @property
    def T(self) -> Self:  # noqa: N802 (NumPy's and torch's name)
        """The axes reversed."""
        return shaping.Transpose.apply(self, tuple(range(self.data.ndim))[::-1])

    def t(self) -> Self:
        """Return a matrix transposed; a vector or number as it is."""
        if self.data.ndim > 2:
            raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {self.data.ndim}D")
        return self.T

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Exchange two axes."""
        axes = list(range(self.data.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return shaping.Transpose.apply(self, tuple(axes))

    def permute(self, *dims: Any) -> Self:
        """Return the tensor with its axes in the order ``dims``."""
        return shaping.Transpose.apply(self, _lengths(dims))

    def expand(self, *shape: Any) -> Self:
        """Repeat along axes of length 1, without a copy; -1 keeps an axis."""
        return shaping.Expand.apply(self, _lengths(shape))

    def expand_as(self, other: Operand) -> Self:
        """Expand to the shape of ``other``."""
        return self.expand(tuple(other.shape))

    def split(self, split_size: int | list[int] | tuple[int, ...], dim: int = 0) -> tuple[Self, ...]:
        """Return parts along an axis: of ``split_size`` elements, the last one fewer, or of listed sizes."""
        axis = normalize_axis_index(dim, self.data.ndim)
        length = self.data.shape[axis]
        if not isinstance(split_size, int):
            sizes = list(split_size)
            if sum(sizes) != length:
                raise RuntimeError(
                    f"split_with_sizes expects split_sizes to sum exactly to {length} (input tensor's size at dimension"
                    f" {dim}), but got split_sizes={sizes}"
                )
        elif split_size <= 0:
            raise RuntimeError(f"split expects split_size be positive, but got split_size={split_size}")
        else:
            sizes = [min(split_size, length - start) for start in range(0, length, split_size)] or [0]
        ends = np.cumsum(sizes)
        before = (slice(None),) * axis
        return tuple(self[(*before, slice(int(end - n), int(end)))] for n, end in zip(sizes, ends, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Return at most ``chunks`` parts of equal length along an axis, the last one shorter."""
        if chunks <= 0:
            raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
        return self.split(max(1, -(-self.data.shape[dim] // chunks)), dim)

    def clone(self) -> Self:
        """Return a copy through which gradients flow."""
        return shaping.Copy.apply(self)

    def contiguous(self) -> Self:
        """Return the tensor itself if in C order, else a copy."""
        return self if self.data.flags.c_contiguous else self.clone()

    # -- device and dtype ------------------------------------------------------------------------------------------

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Self:
        """Return the values on another device, with another dtype, or both; gradients flow back.

        ``device`` is ``"cpu"``, ``"cuda"``, ``"cuda:N"``, N, a dtype, or an object with both; ``copy`` even if nothing
        changes. ``non_blocking`` is ignored: only copies to the host wait.
        """
        convert = conversion(values_of(device), dtype)
        if convert.place == "kept" and self.data.dtype == convert.dtype:
            return self.clone() if copy else self
        if self.requires_grad and mode.enabled and (convert.dtype is None or is_differentiable(convert.dtype)):
            result = arithmetic.Convert.apply(self, convert)
        else:
            result = constant(convert(self.data))
        if result.data is self.data:
            return self.clone() if copy else self
        return result

    def cpu(self) -> Self:
        """Return the values on the host."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Return the values on a GPU, by default the current one."""
        return self.to("cuda" if device is None else device)

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the values with another dtype."""
        return self.to(np.dtype(dtype))

    def half(self) -> Self:
        """Return the values as float16."""
        return self.to(np.float16)

    def double(self) -> Self:
        """Return the values as float64."""
        return self.to(np.float64)

    def long(self) -> Self:
        """Return the values as int64."""
        return self.to(np.int64)

    # Last: their names are types above.

    def bool(self) -> Self:
        """Return the values as booleans."""
        return self.to(np.bool_)

    def int(self) -> Self:
        """Return the values as int32."""
        return self.to(np.int32)

    def float(self) -> Self:
        """Return the values as float32."""
        return self.to(np.float32)


def constant(array: Any) -> Any:
    """Return a tensor off the tape."""
    return Function.output_type(array)


def values_of(operand: Any) -> Any:
    return operand.data if isinstance(operand, Variable) else operand


def _lengths(numbers: tuple[Any, ...]) -> Shape:
    """Return the lengths of ``f(2, 3)`` or ``f((2, 3))``."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], tuple | list) else numbers

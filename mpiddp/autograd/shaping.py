"""Operations that move values. They return views where NumPy does."""
# mypy: disable-error-code="no-any-return"

import math
from typing import Any, Self

from mpiddp.device import array_namespace
from mpiddp.typing import Array, Shape

from .arithmetic import Arithmetic
from .function import Function, normalize_axis_index, values_of


class Copy(Function):
    def forward(self, a: Array) -> Array:
        return a.copy()

    def backward(self, grad: Array) -> Array:
        return grad


class Reshape(Function):
    def forward(self, a: Array, shape: Shape) -> Array:
        self.shape = a.shape
        return a.reshape(shape)

    def backward(self, grad: Array) -> Array:
        return grad.reshape(self.shape)


class Transpose(Function):
    def forward(self, a: Array, axes: tuple[int, ...]) -> Array:
        self.axes = axes
        return a.transpose(axes)

    def backward(self, grad: Array) -> Array:
        inverse = sorted(range(grad.ndim), key=[axis % grad.ndim for axis in self.axes].__getitem__)
        return grad.transpose(inverse)


class Index(Function):
    """``a[index]`` with NumPy's rules; gradients of an element taken twice add up."""

    def forward(self, a: Array, index: Any) -> Any:
        self.index, self.shape = index, a.shape
        return a[index]

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        result = xp.zeros(self.shape, dtype=grad.dtype)
        if _may_repeat(self.index):
            xp.add.at(result, self.index, grad)
        else:
            result[self.index] = grad
        return result


def _may_repeat(index: Any) -> bool:
    """Return whether an index can name an element twice: integer arrays or sequences."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list | tuple) or (getattr(part, "ndim", 0) > 0 and part.dtype.kind != "b") for part in parts
    )


class Join(Function):
    def forward(self, dim: int, *arrays: Array) -> Any:
        self.dim = dim
        self.lengths = [array.shape[dim] for array in arrays]
        return array_namespace(arrays[0]).concatenate(arrays, axis=dim)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        gradients: list[Array | None] = [None]
        before: tuple[slice, ...] = (slice(None),) * (self.dim % grad.ndim)
        start = 0
        for length in self.lengths:
            gradients.append(grad[(*before, slice(start, start + length))])
            start += length
        return tuple(gradients)


class Shaping(Arithmetic):
    """A tensor's indices and shapes."""

    def __getitem__(self, index: Any) -> Self:
        if isinstance(index, tuple):
            index = tuple(values_of(part) for part in index)
        return Index.apply(self, values_of(index))

    def reshape(self, *shape: Any) -> Self:
        """Return the values in another shape; one length may be -1."""
        return Reshape.apply(self, _lengths(shape))

    def view(self, *shape: Any) -> Self:
        """Return the values in another shape. Unlike in torch, the result may be a copy."""
        return Reshape.apply(self, _lengths(shape))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Join the axes from ``start_dim`` to ``end_dim``."""
        shape = self.data.shape or (1,)
        first, last = (normalize_axis_index(dim, len(shape)) for dim in (start_dim, end_dim))
        if first > last:
            raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
        return Reshape.apply(self, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))

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
    def T(self) -> Self:  # noqa: N802
        """The values with the axes in reverse order."""
        return Transpose.apply(self, tuple(range(self.data.ndim))[::-1])

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Exchange two axes."""
        axes = list(range(self.data.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return Transpose.apply(self, tuple(axes))

    def clone(self) -> Self:
        """Return a copy through which gradients flow."""
        return Copy.apply(self)

    def contiguous(self) -> Self:
        """Return the tensor itself if it is in C order, else a copy."""
        return self if self.data.flags.c_contiguous else self.clone()


def _lengths(numbers: tuple[Any, ...]) -> Shape:
    """Return the lengths that were passed as ``f(2, 3)`` or as ``f((2, 3))``."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], tuple | list) else numbers

"""Operations that move values; views where NumPy makes views."""

from __future__ import annotations

from typing import Any

from mpiddp.device import array_namespace
from mpiddp.device.half import widened
from mpiddp.typing import Array, Shape

from .function import Function, unbroadcast


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


class Expand(Function):
    """Repeat along axes of length 1 without copying; -1 keeps an axis."""

    def forward(self, a: Array, shape: Shape) -> Array:
        self.shape = a.shape
        own = (1,) * (len(shape) - a.ndim) + a.shape
        wanted = tuple(m if n == -1 else n for n, m in zip(shape, own, strict=True))
        return array_namespace(a).broadcast_to(a, wanted)  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> Array:
        return unbroadcast(grad, self.shape)


class Index(Function):
    """``a[index]`` with NumPy's rules; gradients of an element taken twice add up."""

    def forward(self, a: Array, index: Any) -> Any:
        self.index, self.shape = index, a.shape
        return a[index]

    def backward(self, grad: Array) -> Array:
        xp = array_namespace(grad)
        repeats = _may_repeat(self.index)
        grad = widened(grad) if repeats else grad
        result = xp.zeros(self.shape, dtype=grad.dtype)
        if repeats:
            xp.add.at(result, self.index, grad)
        else:
            result[self.index] = grad
        return result  # type: ignore[no-any-return]


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


class Pad(Function):
    """A constant around the array; ``widths`` has (before, after) for each axis, negative to cut."""

    def forward(self, a: Array, widths: tuple[tuple[int, int], ...], value: float) -> Any:
        outer = tuple(n + before + after for n, (before, after) in zip(a.shape, widths, strict=True))
        self.shape = a.shape
        self.outside = tuple(
            slice(max(before, 0), n - max(after, 0)) for n, (before, after) in zip(outer, widths, strict=True)
        )
        self.inside = tuple(
            slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(a.shape, widths, strict=True)
        )
        result = array_namespace(a).full(outer, value, dtype=a.dtype)
        result[self.outside] = a[self.inside]
        return result

    def backward(self, grad: Array) -> Array:
        result: Array = array_namespace(grad).zeros(self.shape, dtype=grad.dtype)
        result[self.inside] = grad[self.outside]
        return result

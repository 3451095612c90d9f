"""Products of matrices."""

from __future__ import annotations

from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .function import Function, unbroadcast


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``, into ``out`` if given."""
    return array_namespace(a).matmul(a, b, out=out)  # type: ignore[no-any-return]


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

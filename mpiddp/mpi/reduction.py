"""Reductions: torch's ``ReduceOp``, its meaning by dtype, and its parts.

MPI has no half types, and its MIN and MAX over a NaN differ between ranks (tried on Open MPI and MPICH); those, and all
under ``MPIDDP_DETERMINISTIC=1``, are computed here.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from typing import Any, ClassVar

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .lazy import MPI


class ReduceOp:
    """A reduction over the ranks' elements (``torch.distributed.ReduceOp``).

    ``SUM``, ``AVG`` (floating only), ``PRODUCT``, ``MIN`` and ``MAX`` (NaN if any rank has NaN), ``BAND``, ``BOR``,
    ``BXOR`` (integers and booleans), and ``PREMUL_SUM(factor)``, of elements times their rank's factor. On booleans SUM
    and MAX are "or", PRODUCT and MIN are "and". AVG, and PREMUL_SUM if all ranks have one power of two, may scale the
    sum, which overflows before its scaled terms would.

    Examples
    --------
    >>> ReduceOp.PREMUL_SUM(0.5).factor
    0.5
    """

    __slots__ = ("__weakref__", "factor", "name", "value")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]

    def __init__(self, name: str, value: int, factor: float | None = None) -> None:
        self.name = name
        self.value = value
        self.factor = factor

    def __call__(self, factor: float) -> ReduceOp:
        """Return ``PREMUL_SUM`` with a factor, one object for equal factors.

        RuntimeError for another operation, or one with a factor; TypeError if the factor is no real number.
        """
        if self.name != "PREMUL_SUM" or self.factor is not None:
            raise RuntimeError(f"only ReduceOp.PREMUL_SUM takes a factor, not {self}")
        if not isinstance(factor, numbers.Real):
            raise TypeError(f"the factor of {self} must be a real number, got {factor!r}")
        factor = float(factor)
        # 0.0 equals -0.0, but not as text.
        return _with_factor.setdefault(repr(factor), ReduceOp(self.name, self.value, factor))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" + (f"({self.factor})" if self.factor is not None else "")

    # Identity, with Python's own hash, is the fastest: every call looks operations up.
    def __reduce__(self) -> tuple[Any, ...]:
        if self.factor is None:
            return getattr, (ReduceOp, self.name)
        return ReduceOp.PREMUL_SUM, (self.factor,)


_with_factor: weakref.WeakValueDictionary[str, ReduceOp] = weakref.WeakValueDictionary()


_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
REDUCTIONS = tuple(ReduceOp(_name, _value) for _value, _name in enumerate(_NAMES))
for _op in REDUCTIONS:
    setattr(ReduceOp, _op.name, _op)

_COMBINE = {
    "SUM": "add",
    "AVG": "add",
    "PREMUL_SUM": "add",
    "PRODUCT": "multiply",
    "MIN": "minimum",
    "MAX": "maximum",
    "BAND": "bitwise_and",
    "BOR": "bitwise_or",
    "BXOR": "bitwise_xor",
}


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return False for floats of 8 bits."""
    # 2: a registered dtype. An unpickled array's float32 has 0, others 1.
    return (dtype.kind == "f" and dtype.isbuiltin != 2) or dtype.name == "bfloat16"


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return True if accumulated in float32."""
    return dtype.itemsize == 2 and is_floating(dtype)


@functools.lru_cache(1024)  # each PREMUL_SUM is its own
def check(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Raise TypeError for a reduction undefined on ``dtype``."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be an mpiddp.ReduceOp such as mpiddp.ReduceOp.SUM, got {type(op).__module__} {op!r}")
    floating, complex_ = is_floating(dtype), dtype.kind == "c"
    if not (floating or dtype.kind in "biuc"):
        raise TypeError(f"{op} needs numbers or booleans, got {dtype}; use the object collectives for other data")
    if op.name in ("AVG", "PREMUL_SUM") and not (floating or complex_):
        raise TypeError(f"{op} needs a floating dtype, got {dtype}; use ReduceOp.SUM and divide as you need")
    if op.name in ("BAND", "BOR", "BXOR") and dtype.kind not in "biu":
        raise TypeError(f"Cannot use {op} with non-integral dtype {dtype}")
    if op.name in ("MIN", "MAX") and complex_:
        raise TypeError(f"{op} is not defined on complex numbers, got {dtype}; reduce the real and imaginary views")
    if op.name == "PREMUL_SUM" and op.factor is None:
        raise TypeError("ReduceOp.PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(0.5)")


@functools.lru_cache(1024)
def mpi_op(dtype: np.dtype[Any], op: ReduceOp) -> MPI.Op | None:
    """Return None if MPI's result is undefined."""
    if is_half(dtype) or dtype.kind not in "biufc" or (dtype.kind == "f" and op.name in ("MIN", "MAX")):
        return None
    if dtype.kind in "iu" and dtype.itemsize < 4 and _COMBINE[op.name] == "add":
        return None  # Open MPI saturates long vectors (op/avx), and wraps the rest
    if dtype.kind == "b":
        logical = {"SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "BXOR": MPI.LXOR}
        return logical.get(op.name, MPI.LAND)
    return {
        "add": MPI.SUM,
        "multiply": MPI.PROD,
        "minimum": MPI.MIN,
        "maximum": MPI.MAX,
        "bitwise_and": MPI.BAND,
        "bitwise_or": MPI.BOR,
        "bitwise_xor": MPI.BXOR,
    }[_COMBINE[op.name]]


def combining(op: ReduceOp) -> str:
    """Name NumPy's function."""
    return _COMBINE[op.name]


def combine(op: ReduceOp, a: Array, b: Array, out: Array) -> None:
    """``out`` may be ``a`` or ``b``; MIN and MAX propagate NaN."""
    getattr(array_namespace(a), _COMBINE[op.name])(a, b, out=out)


def _real_parts(x: Array) -> tuple[Array, ...]:
    """NumPy's complex product makes infinity times imaginary zero NaN."""
    if x.dtype.kind != "c":
        return (x,)
    if x.flags.c_contiguous:
        return (x.reshape(-1).view(np.empty(0, x.dtype).real.dtype),)
    return x.real, x.imag  # CuPy's would be copies; its arrays are contiguous here


def scale(x: Array, factor: float, out: Array) -> None:
    """``out`` may be ``x``."""
    for part, target in zip(_real_parts(x), _real_parts(out), strict=True):
        array_namespace(x).multiply(part, part.dtype.type(factor), out=target)


def premultiply(op: ReduceOp, x: Array) -> None:
    """Apply ``PREMUL_SUM``'s factor, before anything is sent."""
    if op.factor is not None and op.factor != 1:
        scale(x, op.factor, x)


def finish(op: ReduceOp, x: Array, size: int) -> None:
    """Divide a sum over ``size`` ranks by them, if ``op`` is ``AVG``."""
    if op.name != "AVG" or size == 1:
        return
    if size & (size - 1) == 0:  # the same bits, faster
        scale(x, 1 / size, x)
        return
    for part in _real_parts(x):
        array_namespace(x).divide(part, part.dtype.type(size), out=part)

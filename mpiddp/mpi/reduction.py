"""Reductions: torch's ``ReduceOp``, and what it means for each dtype.

MPI has no half types, and its MIN and MAX over a NaN give different ranks different results (tried on Open MPI and
MPICH). mpiddp computes these reductions by itself, and all reductions with ``MPIDDP_DETERMINISTIC=1``.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from typing import Any, ClassVar

import numpy as np

from mpiddp.device.half import is_floating

from .lazy import MPI


class ReduceOp:
    """A reduction over the ranks' elements (``torch.distributed.ReduceOp``).

    - ``SUM`` and ``PRODUCT`` take numbers and booleans. For booleans they are "or" and "and".
    - ``AVG`` divides the sum by the number of ranks. It takes floats and complex numbers.
    - ``MIN`` and ``MAX`` take numbers that are not complex, and booleans. They are NaN if one rank has NaN.
    - ``BAND``, ``BOR`` and ``BXOR`` take integers and booleans.
    - ``PREMUL_SUM(factor)`` sums elements times their rank's factor. It takes floats and complex numbers.
    - ``EXACT_SUM`` is the sum of all ranks' elements, rounded once, as `math.fsum` gives it. Its bits do not depend on
      the order of ranks, the algorithm or the nodes. It is for `all_reduce` of float32 and float64. Infinities of both
      signs give NaN, a sum above the largest number gives infinity, and a sum of zeros gives +0.0. It sends arrays of
      8 bytes an element. On two ranks it sends about one such array for each 50 binary places between the largest and
      the smallest digit of all addends.

    AVG may overflow where the average would not, because it may sum before it divides. So may PREMUL_SUM, if all ranks
    have the same power of two as their factor.

    Examples
    --------
    >>> ReduceOp.PREMUL_SUM(0.5).factor
    0.5
    """

    __slots__ = ("__weakref__", "_combining", "_merges", "factor", "name", "value")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    EXACT_SUM: ClassVar[ReduceOp]

    def __init__(
        self, name: str, value: int, factor: float | None = None, merges: tuple[int, ...] | None = None
    ) -> None:
        self.name = name
        self._combining = _COMBINE[name]
        """The name of NumPy's function that combines two ranks' elements."""
        self.value = value
        self.factor = factor
        self._merges = merges
        """For a sum in pairs, how many sums end with each rank's array (see `in_pairs`); None for other reductions."""

    def __call__(self, factor: float) -> ReduceOp:
        """Return ``PREMUL_SUM`` with a factor, the same object for equal factors.

        RuntimeError for another reduction, or if it has a factor already. TypeError if ``factor`` is no real number.
        """
        if self.name != "PREMUL_SUM" or self.factor is not None:
            raise RuntimeError(f"only ReduceOp.PREMUL_SUM takes a factor, not {self}")
        if not isinstance(factor, numbers.Real):
            raise TypeError(f"the factor of {self} must be a real number, got {factor!r}")
        factor = float(factor)
        # The key is text, because 0.0 equals -0.0.
        return _with_factor.setdefault(repr(factor), ReduceOp(self.name, self.value, factor))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" + (f"({self.factor})" if self.factor is not None else "")

    # Every call looks up its reduction in a dict. So reductions are compared and hashed by identity, which is the
    # fastest, and pickle must return the same object.
    def __reduce__(self) -> tuple[Any, ...]:
        if self.factor is None:
            return getattr, (ReduceOp, self.name)
        return ReduceOp.PREMUL_SUM, (self.factor,)


_with_factor: weakref.WeakValueDictionary[str, ReduceOp] = weakref.WeakValueDictionary()


_COMBINE = {
    "SUM": "add",
    "AVG": "add",
    "PRODUCT": "multiply",
    "MIN": "minimum",
    "MAX": "maximum",
    "BAND": "bitwise_and",
    "BOR": "bitwise_or",
    "BXOR": "bitwise_xor",
    "PREMUL_SUM": "add",
    "EXACT_SUM": "add",
}
REDUCTIONS = tuple(ReduceOp(_name, _value) for _value, _name in enumerate(_COMBINE))
for _op in REDUCTIONS:
    setattr(ReduceOp, _op.name, _op)


def in_pairs(factor: float, merges: tuple[int, ...]) -> ReduceOp:
    """Return a ``PREMUL_SUM`` that adds in the order of a binary tree, which ``merges`` describes (`pairs.merges`)."""
    return ReduceOp("PREMUL_SUM", ReduceOp.PREMUL_SUM.value, factor, merges)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return True for float16 and bfloat16, which are accumulated in float32."""
    return dtype.itemsize == 2 and is_floating(dtype)


@functools.lru_cache(1024)  # the cache is bounded, because every factor makes another PREMUL_SUM
def check(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Raise TypeError if ``op`` is no reduction, or is not defined for ``dtype``."""
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
    if op.name == "EXACT_SUM" and dtype not in (np.float32, np.float64):
        exact = "ReduceOp.SUM of integers is exact" if dtype.kind in "biu" else "convert or view it as one of these"
        raise TypeError(f"{op} takes float32 and float64, got {dtype}; {exact}")
    if op.name == "PREMUL_SUM" and op.factor is None:
        raise TypeError("ReduceOp.PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(0.5)")


@functools.lru_cache(1024)
def mpi_op(dtype: np.dtype[Any], op: ReduceOp) -> MPI.Op | None:
    """Return MPI's reduction, or None if MPI has none for the dtype with the right result on all ranks."""
    if op._merges is not None or op.name == "EXACT_SUM":
        return None
    if is_half(dtype) or dtype.kind not in "biufc" or (dtype.kind == "f" and op.name in ("MIN", "MAX")):
        return None
    if dtype.kind in "iu" and dtype.itemsize < 4 and op._combining == "add":
        return None  # in Open MPI (op/avx) sums of long arrays saturate, and sums of short arrays wrap around
    if dtype.kind == "b":
        logical = {"SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "BXOR": MPI.LXOR}
        return logical.get(op.name, MPI.LAND)
    found: MPI.Op = getattr(MPI, {"add": "SUM", "multiply": "PROD"}.get(op._combining, op.name))
    return found

"""Half precision where there is no arithmetic worth the name, as in NumPy: computed in float32, rounded once.

That is what a GPU's tensor cores do too. float16 is NumPy's, bfloat16 (kind ``V``) that of the package ml_dtypes.
"""

from __future__ import annotations

import numpy as np

from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.half import assign, converted
from mpiddp.typing import Array


def is_half(x: Array) -> bool:
    """Tell whether an array is float16 or bfloat16."""
    return x.dtype.itemsize == 2 and x.dtype.kind in "fV"


def widened(x: Array) -> Array:
    """Return an array of half precision as float32, and any other as it is."""
    return converted(x, np.float32) if is_half(x) else x


def sum_dtype(x: Array) -> type | None:
    """Return the dtype to add up in, None for NumPy's own: float16 overflows, and bfloat16 stops growing at 256."""
    return np.float32 if is_half(x) else None


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``.

    Parameters
    ----------
    a, b : array
        As ``numpy.matmul`` takes them.
    out : array, optional
        Where to put the result.

    Notes
    -----
    NumPy's own product of float16 arrays is a plain loop, and that of bfloat16 arrays is a float32. On a device half
    types are multiplied as they are, but for stacks of bfloat16 matrices, for which CuPy 14 has no kernel.
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
    """Return the sum of ``a`` along an axis; of half precision it is a float32."""
    return array_namespace(a).add.reduce(a, axis=axis, dtype=sum_dtype(a), out=out)  # type: ignore[no-any-return]

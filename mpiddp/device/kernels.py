"""The kernel that reduces the ranks' rows in one pass, in row order, half types in float32.

Rows and outputs may be mapped memory of other processes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.typing import Array

from .namespace import cupy

MOST_ROWS = 16
"""Rows, and outputs: a kernel's parameters are limited."""

_HALVES = ("float16", "bfloat16")
"""Passed as uint16: the header with the type depends on CuPy's version."""

# MIN and MAX give NaN where one is NaN; sums of booleans are "or", products "and".
PREAMBLE = """
template<typename T> __device__ T add(T a, T b) { return a + b; }
template<> __device__ bool add(bool a, bool b) { return a || b; }
template<typename T> __device__ T multiply(T a, T b) { return a * b; }
template<> __device__ bool multiply(bool a, bool b) { return a && b; }
template<typename T> __device__ T divide(T a, T b) { return a / b; }
template<typename T> __device__ T minimum(T a, T b) { return a < b || a != a ? a : b; }
template<typename T> __device__ T maximum(T a, T b) { return a > b || a != a ? a : b; }
template<typename T> __device__ T bitwise_and(T a, T b) { return a & b; }
template<typename T> __device__ T bitwise_or(T a, T b) { return a | b; }
template<typename T> __device__ T bitwise_xor(T a, T b) { return a ^ b; }
"""
_FLOAT16 = """
__device__ float from_float16(unsigned short x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ unsigned short to_float16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
"""
# To nearest, ties to even: add half a unit of the last place, and cut the low bits off.
_BFLOAT16 = """
__device__ float from_bfloat16(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ unsigned short to_bfloat16(float x) {
    unsigned int bits = __float_as_uint(x);
    if (x != x) return (unsigned short)(bits >> 16 | 64);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
"""


def source(
    name: str,
    combine: str,
    rows: int,
    outs: int,
    factored: bool,
    divided: bool,
    narrow: tuple[bool, bool] = (True, True),
) -> dict[str, str]:
    """Return the arguments of ``cupy.ElementwiseKernel`` for dtype ``name`` and NumPy's function ``combine``.

    ``narrow`` is False for rows, and for outputs, that are float32 in place of a half type.
    """
    reads_half, writes_half = (name in _HALVES and each for each in narrow)
    wide = "float32" if name in _HALVES else name
    inputs = [f"{'uint16' if reads_half else wide} x{row}" for row in range(rows)]
    inputs += [f"{wide} f{row}" for row in range(rows) if factored]
    inputs += [f"{wide} n"] if divided else []
    steps = []
    for row in range(rows):
        element = f"from_{name}(x{row})" if reads_half else f"x{row}"
        element = f"multiply({element}, f{row})" if factored else element
        steps.append(f"a = {combine}(a, {element})" if row else f"auto a = {element}")
    steps += ["a = divide(a, n)"] if divided else []
    steps += [f"y{out} = to_{name}(a)" if writes_half else f"y{out} = a" for out in range(outs)]
    return {
        "in_params": ", ".join(inputs),
        "out_params": ", ".join(f"{'uint16' if writes_half else wide} y{out}" for out in range(outs)),
        "operation": "; ".join(steps) + ";",
        "name": f"mpiddp_{combine}_{name}",
        "preamble": PREAMBLE + {"float16": _FLOAT16, "bfloat16": _BFLOAT16}.get(name, ""),
    }


@functools.cache
def _kernel(*what: Any) -> Any:
    return cupy().ElementwiseKernel(**source(*what), no_return=True)


def fold(
    combine: str,
    rows: Sequence[Array],
    outs: Sequence[Array],
    stream: Any,
    divisor: int = 1,
    factors: Sequence[float] | None = None,
) -> None:
    """Combine ``rows`` in their order, by NumPy's function ``combine``, into all ``outs``.

    At most `MOST_ROWS` of each; flat, of equal length and dtype. An output may be a row. Either may be float32 in place
    of a half type: only the last sum is rounded.
    """
    if not rows[0].size:
        return
    kinds = rows[0].dtype, outs[0].dtype
    narrow = tuple(kind.name in _HALVES for kind in kinds)
    dtype = kinds[1] if narrow[1] else kinds[0]
    wide = np.dtype(np.float32) if any(narrow) else dtype
    numbers = [wide.type(factor) for factor in factors or ()]
    numbers += [wide.type(divisor)] if divisor != 1 else []
    kernel = _kernel(dtype.name, combine, len(rows), len(outs), factors is not None, divisor != 1, narrow)
    arrays = [x.view(np.uint16) if x.dtype.name in _HALVES else x for x in (*rows, *outs)]
    with cupy().cuda.Device(stream.device_id), stream:
        kernel(*arrays[: len(rows)], *numbers, *arrays[len(rows) :])


def forget() -> None:
    _kernel.cache_clear()

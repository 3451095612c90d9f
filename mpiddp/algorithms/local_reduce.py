"""Local reduction: rows are combined in order, chunk by chunk in the cache, each byte read from memory once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.device.half import assign, converted
from mpiddp.mpi.reduction import ReduceOp, combine, finish, is_half, premultiply, scale
from mpiddp.typing import Array

CHUNK_BYTES = 1 << 17
"""The chunk of a row. Shorter ones cost more calls (two rows of 16 MiB: 3.2 ms by 64 KiB, 2.2 ms by this)."""
CACHE_BYTES = 1 << 19
"""The chunks of all rows: half of a core's second-level cache of 1 to 2 MiB."""
_LINE_BYTES = 64


def bounds(count: int, parts: int, itemsize: int) -> list[int]:
    """Return the bounds of slices, on cache lines, so that no two ranks write to one line."""
    line = max(_LINE_BYTES // itemsize, 1)
    lines = -(-count // line)
    return [min(lines * part // parts * line, count) for part in range(parts)] + [count]


def reduce_rows(
    op: ReduceOp, rows: Sequence[Array], outs: Sequence[Array], size: int, factors: Sequence[float] | None = None
) -> None:
    """Combine ``rows``, flat and alike, in order, and write the result to all ``outs``.

    An output is one of the rows, or shares no memory with any and may have another dtype, to which results are rounded
    once. ``AVG`` divides by ``size``; ``factors`` are the rows' (``PREMUL_SUM``).
    """
    dtype, count = rows[0].dtype, rows[0].size
    common = _common_scale(factors)
    if common is not None:
        factors = None
    wide = accumulated_in(dtype)
    step = max(min(CHUNK_BYTES, CACHE_BYTES // len(rows)) // dtype.itemsize, 1)
    changing = wide != dtype or factors is not None
    # Working in place saves a pass. The overwritten row has been read by then.
    in_place = wide == dtype and (outs[0] is rows[0] or (not changing and len(rows) > 1 and outs[0] is rows[1]))
    spare = None if in_place and not changing else np.empty((2, min(step, count)), wide)
    for start in range(0, count, step):
        if count <= step:  # half of the work for short arrays
            parts, targets = rows, outs
        else:
            chunk = slice(start, min(start + step, count))
            parts, targets = [row[chunk] for row in rows], [out[chunk] for out in outs]
        accumulator = targets[0] if in_place or spare is None else spare[0, : parts[0].size]
        if changing:
            assert spare is not None
            _combine_converted(op, parts, accumulator, spare[1, : parts[0].size], factors)
        elif len(parts) == 1:
            accumulator[...] = parts[0]
        else:
            combine(op, parts[0], parts[1], accumulator)
            for part in parts[2:]:
                combine(op, accumulator, part, accumulator)
        finish(op, accumulator, size)
        if common is not None:
            scale(accumulator, common, accumulator)
        for out in targets[1:] if in_place else targets:
            assign(out, accumulator)


def _common_scale(factors: Sequence[float] | None) -> float | None:
    """Return the factor of all rows if it can follow the sum: a power of two, which rounds nothing."""
    if factors is None or any(factor != factors[0] for factor in factors) or abs(math.frexp(factors[0])[0]) != 0.5:
        return None
    return factors[0]


def _combine_converted(
    op: ReduceOp, parts: Sequence[Array], accumulator: Array, spare: Array, factors: Sequence[float] | None
) -> None:
    for index, part in enumerate(parts):
        target = spare if index else accumulator
        if factors is None:
            assign(target, part)
        elif part.dtype == target.dtype:
            scale(part, factors[index], target)
        else:
            assign(target, part)
            scale(target, factors[index], target)
        if index:
            combine(op, accumulator, spare, accumulator)


def accumulated_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_half(dtype) else dtype


def widened(op: ReduceOp, x: Array) -> Array:
    """Return a flat copy in the accumulation dtype, times this rank's factor."""
    copy = converted(x.reshape(-1), accumulated_in(x.dtype))
    premultiply(op, copy)
    return copy

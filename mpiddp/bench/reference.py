"""Known inputs, and what the operations make of them: a reference that shares no code with what it checks.

Every rank's input repeats a short pattern of small integers that every rank can make for itself. The results of all
operations repeat, too, so that checking an array costs one pass over it, whatever the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.typing import Array

PERIOD = 1021
"""A prime, so that the blocks of an array begin at different places of the pattern."""
_SEED = 20_05
_BLOCK = PERIOD * 64

_FOLD: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "avg": np.mean,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}
# On booleans, sums and maxima are "or", products and minima "and".
_FOLD_BOOL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("sum", "max", "bor"), np.any),
    **dict.fromkeys(("product", "min", "band"), np.all),
}


@functools.cache
def pattern(rank: int, dtype: np.dtype[Any], op: str) -> Array:
    """Return `PERIOD` values of a rank, exact in every dtype, whose reduction is exact for some hundred ranks."""
    rng = np.random.default_rng((_SEED, rank))
    if dtype.kind == "b":
        return rng.random(PERIOD) < 0.5
    if op == "product":  # few twos, or half types overflow
        factors = np.where(rng.random(PERIOD) < 1 / 8, 2, 1)
        signs = 1 if dtype.kind == "u" else rng.choice((-1, 1), PERIOD)
        return (factors * signs).astype(dtype)
    lowest = 0 if dtype.kind == "u" else -3
    return rng.integers(lowest, 4, PERIOD).astype(dtype)


def reduced(size: int, dtype: np.dtype[Any], op: str) -> Array:
    """Return the pattern that a reduction over ranks 0 to ``size`` - 1 gives."""
    rows = np.stack([pattern(rank, dtype, op) for rank in range(size)])
    if dtype.kind == "b":
        if op == "bxor":
            return np.asarray(rows.sum(axis=0) % 2 == 1)
        return np.asarray(_FOLD_BOOL[op](rows, axis=0))
    wide: Array = rows.astype(_wide(dtype))
    found = np.asarray(_FOLD[op](wide, axis=0))
    return found.astype(dtype).astype(wide.dtype) if dtype.kind in "iu" else found  # integers wrap around


def _wide(dtype: np.dtype[Any]) -> type:
    if dtype.kind == "c":
        return np.complex128
    return np.int64 if dtype.kind in "iu" else np.float64


def _tile(values: Array, first: int, count: int) -> Array:
    """Return ``count`` values of a repeated pattern from its place ``first`` on."""
    return np.resize(np.roll(values, -first), count)


def fill(x: Array, values: Array) -> None:
    """Repeat a pattern over a flat array."""
    block = _tile(values, 0, min(_BLOCK, x.size))
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        part[...] = block[: part.size]


def count_wrong(x: Array, values: Array, first: int = 0) -> int:
    """Return how many elements of a flat array are not those of a pattern that begins at its place ``first``.

    An element is right within one unit in the last place of its dtype, relative to the value or to one: what a rounded
    average is off, and far less than what a missing or foreign contribution makes.
    """
    wide = values.astype(_wide(x.dtype)) if x.dtype.kind != "b" else values
    block = _tile(wide, first % PERIOD, min(_BLOCK, x.size))
    tolerance = _unit(x.dtype) * (np.abs(block) + 1) if x.dtype.kind != "b" else None
    wrong = 0
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        want = block[: part.size]
        if tolerance is None:
            wrong += int(np.count_nonzero(part != want))
        else:
            close = np.abs(part.astype(want.dtype) - want) <= tolerance[: part.size]  # false for NaN
            wrong += part.size - int(np.count_nonzero(close))
    return wrong


def _unit(dtype: np.dtype[Any]) -> float:
    """Return the distance from one to the next larger number; 0 for integers."""
    if dtype.kind in "iu":
        return 0.0
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)

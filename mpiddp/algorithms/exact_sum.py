"""The exact sum: what the addends' sum is, rounded once, so its bits do not depend on who adds, when and how.

The ranks agree on the largest and the smallest binary digit of all addends. Each addend is cut into that many digits of
a common grid, which are int64; these are added by whatever algorithm, and no sum of integers is ever rounded. One digit
is enough if the addends' magnitudes differ by about 2 ** 37 (float32) or 2 ** 8 (float64), and most data need one or
two. This is a superaccumulator that has no more words than its data need (U. Kulisch and W. Miranker, "The arithmetic
of the digital computer", SIAM Review 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

_CHUNK = 1 << 15
"""Elements that are converted at a time, in the cache."""
_PIECE_BYTES = 1 << 24
"""The bytes that are sent at a time. They bound the memory, which is a multiple of the array's."""
_POSITIVE, _NEGATIVE = 1, 2
"""The infinities among the addends; a NaN stands for both, whose sum it is."""
_NOTHING = -1 << 20


def all_reduce(all_reduced: Callable[[Link, Array, ReduceOp], Steps], link: Link, x: Array, op: ReduceOp) -> Steps:
    """Sum ``x`` by all-reduces of integers, for which ``all_reduced`` returns the steps."""
    xp, flat = array_namespace(x), x.reshape(-1)
    highest, lowest, special = _extent(xp, flat)
    told = np.array([highest, -lowest, special], np.int64)
    yield from all_reduced(link, told, ReduceOp.MAX)
    link = link.after()
    highest, lowest = int(told[0]), -int(told[1])
    infinities: Array | None = None
    if told[2]:
        infinities = xp.where(flat > 0, _POSITIVE, _NEGATIVE).astype(np.uint8)
        infinities[xp.isnan(flat)] = _POSITIVE | _NEGATIVE
        infinities[xp.isfinite(flat)] = 0
        yield from all_reduced(link, infinities, ReduceOp.BOR)
    bits = 62 - (link.size - 1).bit_length()
    exponents = [highest - bits * (place + 1) for place in range(-(-max(highest - lowest, 1) // bits))]
    step = max(_PIECE_BYTES // (8 * len(exponents)), 1)
    memory = xp.empty(len(exponents) * min(step, flat.size), np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, step):
            piece = flat[start : start + step]
            digits = memory[: len(exponents) * piece.size].reshape(len(exponents), -1)
            if infinities is not None:
                piece[~xp.isfinite(piece)] = 0
            _cut(xp, piece, exponents, digits)
            yield from all_reduced(link, digits, ReduceOp.SUM)
            for at in range(0, piece.size, _CHUNK):
                piece[at : at + _CHUNK] = _joined(xp, digits[:, at : at + _CHUNK], exponents, bits, x.dtype)
    if infinities is not None:
        for code, value in enumerate((np.inf, -np.inf, np.nan), start=1):
            flat[infinities == code] = value


def _extent(xp: Any, flat: Array) -> tuple[int, int, bool]:
    """Return the exponents above and below all digits of the finite elements, and True if others are there."""
    unsigned = np.dtype(f"u{flat.itemsize}")
    magnitude = unsigned.type((1 << 8 * flat.itemsize - 1) - 1)  # all bits but the sign
    infinite = int(np.array(np.inf, flat.dtype).view(unsigned))
    most, least, special = 0, int(np.iinfo(unsigned).max), False
    for start in range(0, flat.size, _CHUNK):
        found = flat[start : start + _CHUNK].view(unsigned) & magnitude  # ordered as the absolute values
        top = int(found.max())
        if top >= infinite:
            special, found = True, found * (found < infinite)
            top = int(found.max())
        most = max(most, top)
        least = min(least, int((found - unsigned.type(1)).min()))  # 0 wraps around
    if most == 0:
        return _NOTHING, -_NOTHING, special
    smallest, largest = np.array([least + 1, most], unsigned).view(flat.dtype)
    limits = np.finfo(flat.dtype)
    lowest = max(int(np.frexp(smallest)[1]) - limits.nmant - 1, limits.minexp - limits.nmant)
    return int(np.frexp(largest)[1]), lowest, special


def _times(xp: Any, x: Array, exponent: int) -> Array:
    """Return ``x`` times a power of two; ldexp is ten times slower."""
    return x * 2.0**exponent if abs(exponent) < 1000 else xp.ldexp(x, exponent)


def _cut(xp: Any, x: Array, exponents: Sequence[int], digits: Array) -> None:
    for start in range(0, x.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        rest = x[chunk].astype(np.float64)
        for exponent, row in zip(exponents, digits, strict=True):
            row[chunk] = _times(xp, rest, -exponent)  # an int64 has no fraction
            if exponent != exponents[-1]:
                rest -= _times(xp, row[chunk].astype(np.float64), exponent)


def _joined(xp: Any, digits: Array, exponents: Sequence[int], bits: int, dtype: np.dtype[Any]) -> Array:
    """Return the digits' number, rounded once to nearest, ties to even."""
    if len(digits) == 1:
        return _times(xp, digits[0].astype(dtype).astype(np.float64), exponents[0])
    _carry(digits, bits)
    negative = digits[0] < 0
    digits = xp.where(negative, -digits, digits)
    _carry(digits, bits)
    mantissa, exponent = digits[0], xp.full(digits.shape[1], exponents[0])
    full, lost = xp.zeros((2, digits.shape[1]), bool)
    for place, digit in zip(exponents[1:], digits[1:], strict=True):
        empty = mantissa == 0
        length = xp.frexp(mantissa.astype(np.float64))[1].astype(np.int64)
        room = xp.where(empty, bits, xp.clip(62 - length, 0, bits))
        room[full] = 0
        full |= room < bits  # what follows is below this digit's part that is lost
        mantissa = (mantissa << room) + (digit >> (bits - room))
        lost |= digit & ((1 << (bits - room)) - 1) != 0
        exponent = xp.where(empty, place, exponent - room)
    # A set last bit makes half of a unit more than that.
    rounded = (mantissa | lost).astype(dtype).astype(np.float64)
    value: Array = xp.where(negative, -1.0, 1.0) * xp.ldexp(rounded, exponent)
    return value


def _carry(digits: Array, bits: int) -> None:
    """Make all digits but the first ones of 0 to 2 ** bits - 1."""
    for index in range(len(digits) - 1, 0, -1):
        carry = digits[index] >> bits
        digits[index] -= carry << bits
        digits[index - 1] += carry

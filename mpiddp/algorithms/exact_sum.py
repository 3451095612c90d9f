"""The exact sum of the addends, rounded once. Its bits do not depend on which ranks add, and in which order.

The ranks agree on the largest and the smallest binary digit of all addends. Each addend is cut into parts that are
multiples of a common power of two and have so few digits that no sum of them is ever rounded, whatever algorithm adds.

If one or two parts are enough, they are float64. A part holds 50 binary places on two ranks, and fewer on more ranks.
A large number is added to an addend and subtracted again, which gives the addend's first part. The second part is what
this addition has lost (S. Rump, T. Ogita and S. Oishi, "Accurate floating-point summation", SIAM Journal on Scientific
Computing 2008). With more than two such parts, the sums of the larger two might cancel, and the result would need a
carry. So addends that need more parts are cut into int64, and so are float64 that are too large for that addition.
The int64 parts are a superaccumulator with no more words than the data need (U. Kulisch and W. Miranker, "The
arithmetic of the digital computer", SIAM Review 1986).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

_CHUNK = 1 << 15
"""How many elements are searched at a time for the largest and the smallest one, so that they stay in the cache."""
_PIECE_BYTES = 1 << 20
"""How many bytes are sent at a time, so that they are still in the cache when they are added and joined."""
_POSITIVE, _NEGATIVE = 1, 2
"""Marks of the infinities among the addends. A NaN gets both marks, because it is the sum of both infinities."""
_NOTHING = -1 << 20
_Convert: TypeAlias = Callable[[Array, Array], None]


def all_reduce(all_reduced: Callable[[Link, Array, ReduceOp], Steps], link: Link, x: Array, op: ReduceOp) -> Steps:
    """Sum ``x`` by all-reduces of its parts, for which ``all_reduced`` returns the steps."""
    xp, flat = array_namespace(x), x.reshape(-1)
    highest, lowest, special = _extent(flat)
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
    parts, kind, cut, joined = _way(xp, x.dtype, highest, lowest, link.size)
    step = max(_PIECE_BYTES // (8 * parts), 1)
    memory = xp.empty(parts * min(step, flat.size), kind)
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        rows = memory[: parts * piece.size].reshape(parts, -1)
        if infinities is not None:
            piece[~xp.isfinite(piece)] = 0
        cut(piece, rows)
        yield from all_reduced(link, rows, ReduceOp.SUM)
        joined(rows, piece)
    if infinities is not None:
        for code, value in enumerate((np.inf, -np.inf, np.nan), start=1):
            flat[infinities == code] = value


def _extent(flat: Array) -> tuple[int, int, bool]:
    """Return the exponents above and below all digits of the finite elements, and True if not all are finite."""
    unsigned = np.dtype(f"u{flat.itemsize}")
    magnitude = unsigned.type((1 << 8 * flat.itemsize - 1) - 1)  # all bits but the sign
    infinite = int(np.array(np.inf, flat.dtype).view(unsigned))
    most, least, special = 0, int(np.iinfo(unsigned).max), False
    for start in range(0, flat.size, _CHUNK):
        found = flat[start : start + _CHUNK].view(unsigned) & magnitude  # ordered as the absolute values are
        top = int(found.max())
        if top >= infinite:
            special, found = True, found * (found < infinite)
            top = int(found.max())
        most = max(most, top)
        least = min(least, int((found - unsigned.type(1)).min()))  # 0 wraps around, and does not count
    if most == 0:
        return _NOTHING, -_NOTHING, special
    smallest, largest = np.array([least + 1, most], unsigned).view(flat.dtype)
    limits = np.finfo(flat.dtype)
    lowest = max(int(np.frexp(smallest)[1]) - limits.nmant - 1, limits.minexp - limits.nmant)
    return int(np.frexp(largest)[1]), lowest, special


def _way(xp: Any, dtype: np.dtype[Any], highest: int, lowest: int, ranks: int) -> tuple[int, type, _Convert, _Convert]:
    """Return how many parts an addend has, their type, and the functions that cut a chunk and join its sums."""
    carries, places = (ranks - 1).bit_length(), max(highest - lowest, 1)
    width = 51 - carries
    parts = -(-places // width)
    if parts <= 2 and (dtype == np.float32 or highest < 900):  # larger float64 might overflow in the addition
        # The last binary digit of each of these numbers is worth as much as the last digit of a part.
        large = [np.float64(1.5 * 2.0 ** (highest - width * part + 52)) for part in range(1, parts)]
        return parts, np.float64, functools.partial(_split, xp, large), functools.partial(_added, xp)
    bits = 62 - carries
    exponents = [highest - bits * (place + 1) for place in range(-(-places // bits))]
    cut, joined = functools.partial(_cut, xp, exponents), functools.partial(_joined, xp, exponents, bits)
    return len(exponents), np.int64, cut, joined


def _split(xp: Any, large: Sequence[np.float64], x: Array, rows: Array) -> None:
    xp.add(x, np.float64(0), out=rows[-1])  # -0.0 becomes 0.0
    for number, row in zip(large, rows, strict=False):
        xp.add(rows[-1], number, out=row)
        row -= number
        rows[-1] -= row


@np.errstate(over="ignore")
def _added(xp: Any, rows: Array, x: Array) -> None:
    found = functools.reduce(xp.add, rows[::-1])  # float64 are rounded here, float32 below
    if x.dtype == np.float32 and len(rows) > 1:
        middle = found.view(np.int64) & 0x1FFFFFFF == 0x10000000
        if middle.any():  # halfway between two float32: the sum's part that float64 has lost decides
            *others, near = rows[:, middle]
            lost = xp.zeros_like(near)
            for other in reversed(others):
                total = other + near
                part = total - other
                error = (other - (total - part)) + (near - part)
                near, lost = total, xp.where(error == 0, lost, error)
            found[middle] = xp.where(lost == 0, near, xp.nextafter(near, xp.copysign(np.inf, lost)))
    x[...] = found


def _cut(xp: Any, exponents: Sequence[int], x: Array, rows: Array) -> None:
    rest = x.astype(np.float64)
    for exponent, row in zip(exponents, rows, strict=True):
        row[...] = xp.ldexp(rest, -exponent)  # the row is int64, so this drops the fraction
        rest -= xp.ldexp(row.astype(np.float64), exponent)


@np.errstate(over="ignore")
def _joined(xp: Any, exponents: Sequence[int], bits: int, digits: Array, x: Array) -> None:
    """Write the digits' number, rounded once to nearest, ties to even, to ``x``."""
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
        full |= room < bits  # all later digits are below the part of this one that is lost
        mantissa = (mantissa << room) + (digit >> (bits - room))
        lost |= digit & ((1 << (bits - room)) - 1) != 0
        exponent = xp.where(empty, place, exponent - room)
    # If something is lost, a set last bit makes an apparent tie more than half of a unit.
    rounded = (mantissa | lost).astype(x.dtype).astype(np.float64)
    x[...] = xp.where(negative, -1.0, 1.0) * xp.ldexp(rounded, exponent)


def _carry(digits: Array, bits: int) -> None:
    """Carry, so that all digits but the first are from 0 to 2 ** bits - 1."""
    for index in range(len(digits) - 1, 0, -1):
        carry = digits[index] >> bits
        digits[index] -= carry << bits
        digits[index - 1] += carry

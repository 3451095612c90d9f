"""Sizes in bytes as a person writes them, and the sweep over them. Imports the standard library only."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse(text: str) -> int:
    """Return the bytes that ``text`` names: an integer, or a number with K, M or G, which are powers of 1,024.

    Raises
    ------
    ValueError
        If it names none, or no whole positive number of bytes.

    Examples
    --------
    >>> parse("8"), parse("1.5K"), parse("128M")
    (8, 1536, 134217728)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if size < 1 or size != int(size):
        raise ValueError(f"a size is a number of bytes such as 8, 64K, 1.5M or 2G, got {text!r}")
    return int(size)


def text(size_bytes: float) -> str:
    """Return a size as `parse` reads it, in the largest unit that leaves it whole, else with one decimal.

    Examples
    --------
    >>> text(8), text(65536), text(1000), text(1_500_000)
    ('8', '64K', '1000', '1.4M')
    """
    whole = next((unit for unit in "GMK" if size_bytes and size_bytes % _UNITS[unit] == 0), "")
    if whole or size_bytes < 10_000:
        return f"{size_bytes / _UNITS[whole]:.0f}{whole}"
    unit = next(unit for unit in "GMK" if size_bytes >= _UNITS[unit])
    return f"{size_bytes / _UNITS[unit]:.1f}{unit}"


def sweep(begin: int, end: int, factor: float) -> list[int]:
    """Return the sizes from ``begin`` to ``end``, each ``factor`` times the one before.

    Raises
    ------
    ValueError
        If there are none, or they do not grow.

    Examples
    --------
    >>> sweep(8, 100, 2)
    [8, 16, 32, 64]
    """
    if factor <= 1:
        raise ValueError(f"the factor between sizes (-f) has to be larger than 1, got {factor:g}")
    if begin > end:
        raise ValueError(f"sizes begin (-b) at {text(begin)} bytes, beyond their end (-e) at {text(end)}")
    found: list[int] = []
    size = float(begin)
    while size <= end:
        if not found or int(size) > found[-1]:
            found.append(int(size))
        size *= factor
    return found

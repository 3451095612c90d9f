"""Packing: several arrays in one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpiddp.typing import Array

from .namespace import array_namespace


def packed(arrays: Sequence[Array]) -> Array:
    """Return a new flat array of the arrays' values, of one dtype."""
    flat: Array = array_namespace(arrays[0]).concatenate([x.reshape(-1) for x in arrays])
    return flat


def unpack(flat: Array, arrays: Iterable[Array]) -> None:
    """Copy the values of `packed` arrays back to them."""
    start = 0
    for x in arrays:
        x[...] = flat[start : start + x.size].reshape(x.shape)
        start += x.size

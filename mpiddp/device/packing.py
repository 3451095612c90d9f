"""Several arrays as one, for a single message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpiddp.typing import Array

from .namespace import array_namespace


def packed(arrays: Sequence[Array]) -> Array:
    """Return one flat array; the dtypes are equal."""
    flat: Array = array_namespace(arrays[0]).concatenate([x.reshape(-1) for x in arrays])
    return flat


def unpack(flat: Array, arrays: Iterable[Array]) -> None:
    start = 0
    for x in arrays:
        x[...] = flat[start : start + x.size].reshape(x.shape)
        start += x.size

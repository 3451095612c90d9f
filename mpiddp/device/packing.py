"""Packing of several arrays into one array, for a single message."""

import math
from collections.abc import Iterable, Iterator, Sequence

from mpiddp.typing import Array, Shape

from .namespace import array_namespace


def packed(arrays: Sequence[Array]) -> Array:
    """Return one flat array of all elements. The dtypes of ``arrays`` are equal."""
    flat: Array = array_namespace(arrays[0]).concatenate([x.reshape(-1) for x in arrays])
    return flat


def views(flat: Array, shapes: Iterable[Shape]) -> Iterator[Array]:
    """Yield consecutive views of a flat array, one of each shape."""
    start = 0
    for shape in shapes:
        stop = start + math.prod(shape)
        yield flat[start:stop].reshape(shape)
        start = stop


def unpack(flat: Array, arrays: Sequence[Array]) -> None:
    for x, view in zip(arrays, views(flat, (x.shape for x in arrays)), strict=True):
        x[...] = view

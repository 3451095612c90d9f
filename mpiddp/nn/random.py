"""Random numbers for initial values and dropout, from one seed.

There are two PCG64 streams. *values* is the same on every rank, so that models start equal. *dropout* has the key
(seed, rank), and after :func:`set_step` the key (seed, rank, step): a rank that takes the place of a failed one draws
the same masks.
"""

import functools
from typing import Any

import numpy as np

from mpiddp import moved
from mpiddp.arguments import whole
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array


class _Stream:
    """Random numbers that follow from a seed and a key."""

    def __init__(self, seed: int, *key: int) -> None:
        self.seed, self.key = seed, key

    @functools.cached_property
    def generator(self) -> np.random.Generator:  # made on demand: it takes 20 us, and most steps do not need it
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=self.key)))


# The key keeps the dropout of rank 0 apart from the initial values.
_values, _dropout = _Stream(0), _Stream(0, 0)


def manual_seed(seed: int) -> None:
    """Seed both streams: initial values are equal on all ranks, dropout differs. Without a call the seed is 0."""
    global _values, _dropout
    bits = whole("seed", seed) & 0xFFFF_FFFF_FFFF_FFFF
    _values, _dropout = _Stream(bits), _Stream(bits, _dropout.key[0])


def set_stream(stream: int) -> None:
    """Choose this process's dropout stream, normally its rank."""
    if stream != _dropout.key[0]:
        set_step(stream=stream)


def set_step(*step: int, stream: int | None = None) -> None:
    """Restart dropout for a training step, so that its masks do not depend on earlier draws.

    ``step`` has the numbers that identify the step. ``stream``, if given, replaces this process's dropout stream.
    """
    global _dropout
    _dropout = _Stream(_dropout.seed, _dropout.key[0] if stream is None else stream, *step)


def value_generator() -> np.random.Generator:
    return _values.generator


def keep_mask(like: Array, p: float) -> Array:
    """Return random factors, each 0 with probability ``p``, else 1 / (1 - p).

    The array has the shape, dtype and memory order of ``like``.
    """
    xp = array_namespace(like)
    mask = xp.empty_like(like)
    lying = mask.transpose(sorted(range(mask.ndim), key=lambda axis: -mask.strides[axis]))  # a view in C order
    if is_device_array(like):
        low, high = map(int, _dropout.generator.integers(1 << 32, size=2))
        kept = scrambled(xp, like.size, low, high) >= np.uint32(p * 0xFFFF_FFFF)
    else:
        kept = _kept(mask.size, p)
    xp.multiply(kept.reshape(lying.shape), like.dtype.type(1 / (1 - p) if p < 1 else 0), out=lying)
    return mask  # type: ignore[no-any-return]


def _kept(count: int, p: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return ``count`` booleans, each False with probability ``p``.

    16 random bits decide each boolean, in half the time of a random float32. If ``p`` is no multiple of 2 ** -16, one
    boolean in 65,536 remains undecided and gets more bits.
    """
    threshold, rest = divmod(p * 2**16, 1)
    bits = _dropout.generator.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    kept: np.ndarray[Any, np.dtype[np.bool_]] = bits >= int(threshold)
    if rest:
        undecided = np.flatnonzero(bits == int(threshold))
        kept[undecided] = _dropout.generator.random(len(undecided)) >= rest
    return kept


def scrambled(xp: Any, size: int, low: int, high: int) -> Array:
    """Return ``size`` uniform uint32 numbers that follow from the key ``(low, high)``.

    The caller draws the key on the host, because a device's generator has no state that a checkpoint could save.
    Each index is mixed with the key and scrambled twice by ``lowbias32`` (C. Wellons, "Prospecting for hash functions",
    2018).
    """
    bits = xp.arange(size, dtype=np.uint32)
    for key in (low, high):
        bits ^= np.uint32(key)
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x7FEB352D)
        bits ^= bits >> np.uint32(15)
        bits *= np.uint32(0x846CA68B)
        bits ^= bits >> np.uint32(16)
    return bits  # type: ignore[no-any-return]


moved.explain(__name__)

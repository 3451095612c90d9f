"""Random numbers for initial values and for dropout, from one seed.

Two streams, both PCG64: *values* is the same on every rank, so models start equal; *dropout* is keyed by (seed, rank),
so ranks drop different units. This package knows no ranks: a layer that does calls :func:`set_stream`. Imports
``device`` and ``typing``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.device import array_namespace
from mpiddp.typing import Array

State = dict[str, Any]


class _Streams:
    """The process's two generators, and what they were made from."""

    def __init__(self, seed: int, stream: int) -> None:
        self.seed, self.stream = seed, stream
        self.values = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self.restart_dropout(stream)

    def restart_dropout(self, stream: int) -> None:
        """Start the dropout stream of a rank at its beginning."""
        self.stream = stream
        # A spawn key of its own: stream 0's numbers are not those of the initial values.
        key = np.random.SeedSequence(self.seed, spawn_key=(stream,))
        self.dropout = np.random.Generator(np.random.PCG64(key))


_streams = _Streams(seed=0, stream=0)


def manual_seed(seed: int) -> None:
    """Start both streams anew.

    Parameters
    ----------
    seed : int
        Any integer, 0 before the first call. Equal seeds give equal initial values on every rank, and each rank its own
        dropout masks.

    Examples
    --------
    >>> from mpiddp import nn
    >>> nn.manual_seed(1)
    >>> first = nn.Linear(3, 2).weight.data
    >>> nn.manual_seed(1)
    >>> bool((first == nn.Linear(3, 2).weight.data).all())
    True
    """
    global _streams
    _streams = _Streams(int(seed) & 0xFFFF_FFFF_FFFF_FFFF, _streams.stream)


def initial_seed() -> int:
    """Return the seed that the streams were started from."""
    return _streams.seed


def set_stream(stream: int) -> None:
    """Say which dropout stream is this process's, normally its rank; does nothing if it is already."""
    if stream != _streams.stream:
        _streams.restart_dropout(stream)


def get_state() -> State:
    """Return where both streams are, as a dictionary of strings and integers that JSON takes."""
    return {
        "seed": _streams.seed,
        "stream": _streams.stream,
        "values": dict(_streams.values.bit_generator.state),
        "dropout": dict(_streams.dropout.bit_generator.state),
    }


def set_state(state: State) -> None:
    """Go back to where :func:`get_state` was called: the same numbers follow."""
    global _streams
    streams = _Streams(int(state["seed"]), int(state["stream"]))
    streams.values.bit_generator.state = state["values"]
    streams.dropout.bit_generator.state = state["dropout"]
    _streams = streams


def value_generator() -> np.random.Generator:
    """Return the generator of initial values."""
    return _streams.values


def keep_mask(like: Array, p: float) -> Array:
    """Return an array like ``like``, in its memory order too, of 0 (with probability ``p``) and 1 / (1 - p)."""
    xp = array_namespace(like)
    mask = xp.empty_like(like)
    # Drawn in the order of the shape, so that the memory order does not change which values are dropped.
    kept = _streams.dropout.random(like.shape, dtype=np.float32) >= p
    xp.multiply(xp.asarray(kept), like.dtype.type(1 / (1 - p) if p < 1 else 0), out=mask)
    return mask  # type: ignore[no-any-return]

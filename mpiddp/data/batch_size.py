"""The check of a batch size. Imports NumPy only."""

from __future__ import annotations

import operator

import numpy as np


def checked_batch_size(batch_size: object) -> int:
    """Return ``batch_size`` as an int if it is a positive integer.

    Raises
    ------
    TypeError
        If it is no integer. For a float the text names the integer to use: ``128 / float(size)`` is how the tutorial
        computes it, which Python 3 and every sampler refuse.
    ValueError
        If it is below 1.
    """
    if isinstance(batch_size, (float, np.floating)):
        raise TypeError(
            f"batch_size should be an integer, got the float {batch_size:g}; pass {max(int(batch_size), 1)} "
            "(divide with // instead of /)"
        )
    if isinstance(batch_size, bool):
        raise TypeError(f"batch_size should be an integer, got {batch_size!r}")
    try:
        size = operator.index(batch_size)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"batch_size should be an integer, got {type(batch_size).__name__}") from None
    if size < 1:
        raise ValueError(f"batch_size should be a positive integer value, but got batch_size={size}")
    return size


__all__ = ["checked_batch_size"]

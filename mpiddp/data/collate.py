"""From a list of samples to a batch. Imports NumPy and ``device``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, is_device_array


def default_collate(samples: list[Any]) -> Any:
    """Make one batch of a list of samples of the same structure.

    Parameters
    ----------
    samples : list
        At least one sample. Arrays, numbers, strings and bytes, or tuples, named tuples, lists and mappings of them,
        nested at will.

    Returns
    -------
    Any
        The structure of one sample with arrays of shape (n, ...) for arrays, arrays of shape (n,) for numbers (int64,
        float64, bool, or the type of a NumPy scalar) and lists for strings and bytes. Unlike torch's, it keeps a tuple
        a tuple.

    Raises
    ------
    ValueError
        If there is no sample, or samples differ in length or shape.
    TypeError
        If a sample is of a type that makes no batch.

    Examples
    --------
    >>> default_collate([(np.zeros(3), 1), (np.ones(3), 0)])
    (array([[0., 0., 0.],
           [1., 1., 1.]]), array([1, 0]))
    """
    if not samples:
        raise ValueError("default_collate needs at least one sample, got an empty list")
    first = samples[0]
    if isinstance(first, np.ndarray) or is_device_array(first):
        shapes = {sample.shape for sample in samples}
        if len(shapes) > 1:
            raise ValueError(
                f"default_collate needs arrays of one shape, got {sorted(shapes)}; pad them, or pass a collate_fn"
            )
        return array_namespace(first).stack(samples)
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return np.asarray(samples)
    if isinstance(first, (str, bytes)):
        return samples
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError("default_collate needs samples of equal length; pass a collate_fn for ragged ones")
        fields = [default_collate(list(field)) for field in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*fields)
        return tuple(fields) if isinstance(first, tuple) else fields
    raise TypeError(
        f"default_collate makes batches of arrays, numbers, strings, tuples, lists and mappings, not of "
        f"{type(first).__name__}; pass a collate_fn"
    )


__all__ = ["default_collate"]

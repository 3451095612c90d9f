"""``synthetic``: made-up data of any shape and number, which a network can learn."""

from __future__ import annotations

import numpy as np

from mpiddp.typing import Shape

from .dataset import ArrayDataset


def synthetic(
    n: int = 1024,
    shape: Shape = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
    *,
    train: bool = True,
    noise: float = 1.0,
) -> ArrayDataset:
    """Return noisy copies of one random prototype per class.

    Parameters
    ----------
    n : int, default 1024
        Number of samples. Classes take turns, so they differ in number by one at most.
    shape : tuple of int, default (1, 28, 28)
        Shape of a sample.
    classes : int, default 10
        Number of classes.
    seed : int, default 0
        The same seed gives the same data on every rank and machine.
    train : bool, default True
        False gives other samples of the same classes, for the test.
    noise : float, default 1.0
        Standard deviation of the noise; that of the prototypes is 1.

    Returns
    -------
    ArrayDataset
        Samples, float32 (n, *shape), and labels, int64 (n,).

    Raises
    ------
    ValueError
        If there is no class, or ``n`` is negative.

    Examples
    --------
    >>> x, y = synthetic(5, shape=(3,), classes=2).arrays
    >>> x.shape, y
    ((5, 3), array([0, 1, 0, 1, 0]))
    """
    if classes < 1 or n < 0:
        raise ValueError(f"synthetic needs at least one class and no negative n, got classes={classes} and n={n}")
    prototypes = np.random.default_rng([seed, 0]).standard_normal((classes, *shape), dtype=np.float32)
    labels = np.arange(n) % classes
    samples = np.random.default_rng([seed, 1 if train else 2]).standard_normal((n, *shape), dtype=np.float32)
    samples *= np.float32(noise)
    samples += prototypes[labels]
    return ArrayDataset(samples, labels)


__all__ = ["synthetic"]

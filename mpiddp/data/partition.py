"""``DataPartitioner`` of the tutorial "Writing distributed applications with PyTorch".

A fixed split of a data set among ranks (or into training, validation and test parts), the same on every rank because
all shuffle by the same seed. Unlike a :class:`~mpiddp.data.DistributedSampler`, a rank sees the same samples in every
epoch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from .dataset import Dataset, Subset


class Partition(Subset):
    """One part of a partitioned data set: a data set itself, with whole batches where the original has them."""


class DataPartitioner:
    """Cut a data set into random parts of given relative sizes.

    Parameters
    ----------
    data : Dataset
        What to partition.
    sizes : sequence of float, default (0.7, 0.2, 0.1)
        Fraction of each part; part ``i`` has ``int(sizes[i] * len(data))`` samples. The sum may be below 1.
    seed : int, default 1234
        Seed of the shuffle. All ranks need the same.

    Raises
    ------
    ValueError
        If a size is negative or the sizes add up to more than 1.

    Notes
    -----
    The order is that of ``random.Random(seed).shuffle``, so parts are those of the tutorial, index for index.

    References
    ----------
    https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html

    Examples
    --------
    >>> parts = DataPartitioner(list("abcdefghij"), [0.5, 0.5])
    >>> len(parts.use(0)), sorted([*parts.use(0), *parts.use(1)]) == list("abcdefghij")
    (5, True)
    """

    def __init__(self, data: Dataset, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        sizes = list(sizes)
        # Rounding: [1 / 49] * 49 adds up to slightly more than one.
        if not sizes or min(sizes) < 0 or sum(sizes) > 1 + 1e-9:
            raise ValueError(
                f"DataPartitioner needs sizes that are fractions, none negative, of sum at most 1; got {sizes} of sum "
                f"{sum(sizes):g}. For equal parts pass [1 / n] * n"
            )
        self.data = data
        indexes = list(range(len(data)))
        random.Random(seed).shuffle(indexes)
        lengths = [int(size * len(data)) for size in sizes]
        self.partitions = [
            indexes[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
        ]

    def use(self, partition: int) -> Partition:
        """Return part ``partition``, 0 up to the number of sizes.

        Raises
        ------
        IndexError
            If there is no such part.
        """
        if not 0 <= partition < len(self.partitions):
            raise IndexError(
                f"DataPartitioner has parts 0 to {len(self.partitions) - 1}, got {partition}; give one size per rank"
            )
        return Partition(self.data, self.partitions[partition])


__all__ = ["DataPartitioner", "Partition"]

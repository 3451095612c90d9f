"""``DistributedSampler``: each rank's share of an epoch, one sample at a time, in torch's order."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Literal

import numpy as np

from mpiddp.typing import Array

from .epoch import EpochWalk


class DistributedSampler(EpochWalk):
    """Give rank ``r`` of ``N`` every N-th sample of the epoch's order, from ``r`` on.

    The order, the padding and the arithmetic are torch's to the letter.

    Parameters
    ----------
    dataset : Sized
        The data set to sample from.
    num_replicas, rank : int, optional
        Number of ranks, and this one. Default: the world's, so the process group has to be initialised.
    shuffle : bool, default True
        Another order in each epoch; needs :meth:`set_epoch`.
    seed : int, default 0
        The same on every rank.
    drop_last : bool, default False
        Drop up to ``N - 1`` samples at the end of the order, so that all ranks have equally many.
    mode : {"pad", "exact"}, default "pad"
        What to do where the length is no multiple of ``N`` and nothing is dropped. "pad" (torch) repeats samples from
        the start of the order, so that all ranks have equally many. "exact" repeats and drops nothing: lengths of
        ranks differ by up to one. Right for an evaluation that counts every sample once; training then needs
        :meth:`DistributedDataParallel.join <mpiddp.DistributedDataParallel.join>` or a
        :class:`~mpiddp.data.GlobalBatchSampler`.

    Raises
    ------
    ValueError
        If ``rank`` is not one of ``num_replicas``, ``mode`` is unknown, or it is "exact" with ``drop_last``.

    Notes
    -----
    :meth:`state_dict` holds the position in the order, in samples of all ranks; after :meth:`load_state_dict` the
    rest of the epoch is shared anew among the ranks that there are then. ``len`` is always that of a whole epoch.

    Warns once when an epoch is iterated to its end twice with ``shuffle``: the call of ``set_epoch`` was forgotten.

    References
    ----------
    ``torch.utils.data.distributed.DistributedSampler``

    Examples
    --------
    >>> [list(DistributedSampler(range(10), 3, rank, shuffle=False)) for rank in range(3)]
    [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    >>> [list(DistributedSampler(range(10), 3, rank, shuffle=False, mode="exact")) for rank in range(3)]
    [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: Literal["pad", "exact"] = "pad",
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)
        if mode not in ("pad", "exact"):
            raise ValueError(f"DistributedSampler knows the modes 'pad' and 'exact', got {mode!r}")
        if drop_last and mode == "exact":
            raise ValueError("mode='exact' drops nothing: leave out drop_last=True, or use mode='pad'")
        self.drop_last = drop_last
        self.mode = mode
        self.total_size = self._total(len(dataset))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def _total(self, n: int) -> int:
        """Return how many samples all ranks together take where ``n`` are left."""
        if self.mode == "exact":
            return n
        return (n if self.drop_last else n + self.num_replicas - 1) // self.num_replicas * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order, start = self._begin()
        n = len(order)
        stop = start + self._total(max(n - start, 0))
        mine: Array = np.take(order, np.arange(start + self.rank, stop, self.num_replicas), mode="wrap") if n else order
        for index in mine.tolist():
            # Never beyond the data set: a position in the padding would mean nothing to another number of ranks.
            self.position = min(self.position + self.num_replicas, n)
            yield index
        self._end(min(stop, n))


__all__ = ["DistributedSampler"]

"""The sampler of synchronous training: the global batch is fixed, the ranks divide it among them.

With it the samples of a step, and so its gradient, do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass

from mpiddp.typing import Array

from .batch_size import checked_batch_size
from .epoch import EpochWalk


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How large a batch is, on this rank and on all.

    Attributes
    ----------
    index : int
        Number of the batch in its epoch, from 0.
    samples : int
        How many of its samples this rank has; may be 0.
    global_samples : int
        How many samples all ranks together have. Every rank knows it without asking the others.
    """

    index: int
    samples: int
    global_samples: int


class GlobalBatchSampler(EpochWalk):
    """Divide batches of ``batch_size`` samples among the ranks.

    Batch ``k`` is samples ``k B`` to ``(k + 1) B`` of the epoch's order; rank ``r`` takes every N-th of them from
    ``r`` on. Pass it to :class:`~mpiddp.data.DataLoader` as ``batch_sampler``.

    Parameters
    ----------
    dataset : Sized
        The data set to sample from.
    batch_size : int
        ``B``, samples a step over all ranks together; at least the number of ranks.
    num_replicas, rank : int, optional
        Number of ranks, and this one. Default: the world's, so the process group has to be initialised.
    shuffle : bool, default True
        Another order in each epoch; needs :meth:`set_epoch`.
    seed : int, default 0
        The same on every rank.
    drop_last : bool, default False
        Leave out the last batch if it is not full.

    Attributes
    ----------
    current : BatchShare or None
        Size of the batch given last. A loader with workers is ahead of its consumer: ask
        :attr:`DataLoader.current <mpiddp.data.DataLoader.current>` there.

    Raises
    ------
    TypeError, ValueError
        If ``batch_size`` is not an integer of at least the number of ranks, or ``rank`` is not a rank.

    Notes
    -----
    Ranks differ by up to one sample in every batch if ``B`` is no multiple of ``N``, so the mean of their gradients
    is right only if each is weighted by its number of samples: ``current.samples`` and ``current.global_samples``.

    A last batch may have fewer samples than there are ranks. All ranks still get it, or the step's collectives would
    not meet; a rank that has none of its samples gets the batch's first one as a stand-in, with ``current.samples``
    0. Its gradient then has the weight 0, and no model ever sees an empty batch, whose mean loss would be NaN. What
    is counted over an epoch has to be weighted by ``current.samples`` as well.

    :meth:`state_dict` holds the position in the order. After :meth:`load_state_dict` the batches go on from there,
    with any number of ranks and any batch size, and every sample is seen once. ``len`` is always that of a whole epoch.

    Examples
    --------
    >>> [[i.tolist() for i in GlobalBatchSampler(range(7), 4, 2, rank, shuffle=False)] for rank in range(2)]
    [[[0, 2], [4, 6]], [[1, 3], [5]]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)
        self.batch_size = checked_batch_size(batch_size)
        if self.batch_size < self.num_replicas:
            raise ValueError(
                f"batch_size is that of all ranks together: {self.batch_size} samples cannot be divided among "
                f"{self.num_replicas} ranks; use {self.num_replicas} or more, or fewer ranks"
            )
        self.drop_last = drop_last
        self.current: BatchShare | None = None

    def __len__(self) -> int:
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Array]:
        order, start = self._begin()
        for begin in range(start, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            if self.drop_last and len(batch) < self.batch_size:
                break
            mine = batch[self.rank :: self.num_replicas]
            self.position = begin + len(batch)
            self.current = BatchShare(begin // self.batch_size, len(mine), len(batch))
            yield mine if len(mine) else batch[:1]
        self._end(self.position)


__all__ = ["BatchShare", "GlobalBatchSampler"]

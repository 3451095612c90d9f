"""Samplers for one process, and samplers that divide the order of an epoch among ranks without communication."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mpiddp.algorithms.pairs import shares
from mpiddp.arguments import whole
from mpiddp.distributed import get_rank, get_world_size
from mpiddp.mpi.recorder import warn
from mpiddp.typing import Array

from .permutation import randperm


def checked_batch_size(batch_size: object) -> int:
    """Return ``batch_size`` if it is a positive integer.

    A float, such as ``128 / float(size)`` of torch's tutorial, raises TypeError, which names the integer to pass.
    """
    if isinstance(batch_size, (float, np.floating)):
        raise TypeError(
            f"batch_size should be an integer, got the float {batch_size:g}; pass {max(int(batch_size), 1)} "
            "(divide with // instead of /)"
        )
    return whole("batch_size", batch_size, 1)


class RandomSampler:
    """Visit the samples in a random order, which is new in each iteration.

    ``generator`` is a random generator of NumPy or a seed for one. By default every process has another order.
    """

    def __init__(self, data_source: Sized, *, generator: np.random.Generator | int | None = None) -> None:
        self.data_source = data_source
        self.generator = np.random.default_rng(generator)

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(len(self.data_source)).tolist())


class BatchSampler:
    """Group the indices of a sampler, which has a length, into lists of ``batch_size`` indices.

    The last list may be shorter, unless ``drop_last``. State and epoch are the sampler's. A state taken between two
    batches has the position between them.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = checked_batch_size(batch_size)
        self.drop_last = drop_last

    def __len__(self) -> int:
        n = len(self.sampler)  # type: ignore[arg-type]
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, or an empty one if the sampler has none."""
        return self.sampler.state_dict() if hasattr(self.sampler, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state on to the sampler."""
        if hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state)


class EpochSampler:
    """Base of the distributed samplers: each rank computes the order of an epoch, and takes a part of it.

    The order is that of :func:`~mpiddp.data.randperm` with ``seed + epoch``, or of the data set without ``shuffle``.
    ``position`` is the number of samples of that order that all ranks together have received.
    """

    def __init__(self, dataset: Sized, num_replicas: int | None, rank: int | None, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {self.num_replicas - 1}]")
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._start = 0
        self._finished = False
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, and so its order. All ranks must choose the same epoch.

        Choosing the epoch that :meth:`load_state_dict` restored keeps the restored position.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = self._start = 0
            self._finished = False

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position and the parameters of the order, as plain numbers.

        Save the state of rank 0, which is never behind another rank. Any number of ranks can continue from it.
        """
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Another length, seed or shuffle raises ValueError, because samples would repeat.
        """
        for key, mine in self.state_dict().items():
            if key not in ("epoch", "position") and state[key] != mine:
                raise ValueError(
                    f"the state was saved with {key}={state[key]}, this sampler has {key}={mine}; the order of "
                    f"samples would be another. Make the sampler with {key}={state[key]}, or start a new epoch"
                )
        self.set_epoch(state["epoch"])
        self._finished = False
        self.position = self._start = state["position"]

    def _begin(self) -> tuple[Array, int]:
        """Return the order of the epoch and the position to begin at; a restored position serves one iteration."""
        self.position, self._start = self._start, 0
        n = len(self.dataset)
        return randperm(n, self.seed + self.epoch) if self.shuffle else np.arange(n), self.position

    def _end(self, position: int) -> None:
        """Record the end of the epoch; warn if the same epoch has ended before."""
        # The warning comes at the end of an epoch, because a script may look at a first batch before set_epoch.
        if self.shuffle and self._finished and not self._warned:
            self._warned = True
            warn(
                f"epoch {self.epoch} was iterated a second time, in the same order; call set_epoch(epoch) on the "
                "loader or its sampler before each epoch"
            )
        self.position = position
        self._finished = True


class DistributedSampler(EpochSampler):
    """Give rank ``r`` of ``N`` every N-th sample of the epoch's order, from ``r`` on; order and padding are torch's.

    After :meth:`load_state_dict` the ranks divide the rest of the epoch, but ``len`` remains that of a whole epoch. A
    second epoch in the same order gives a warning that :meth:`set_epoch` was not called.

    Parameters
    ----------
    drop_last : bool
        If ``N`` does not divide the length, drop up to ``N - 1`` samples at the end, so that ranks have equally many.
        By default samples from the start of the order are repeated; a :class:`~mpiddp.data.GlobalBatchSampler` gives
        each sample once, as an evaluation needs it.

    Examples
    --------
    >>> [list(DistributedSampler(range(10), 3, rank, shuffle=False)) for rank in range(3)]
    [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)
        self.drop_last = drop_last
        self.total_size = self._total(len(dataset))
        self.num_samples = self.total_size // self.num_replicas

    def _total(self, n: int) -> int:
        return (n if self.drop_last else n + self.num_replicas - 1) // self.num_replicas * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order, start = self._begin()
        n = len(order)
        stop = start + self._total(max(n - start, 0))
        mine: Array = np.take(order, np.arange(start + self.rank, stop, self.num_replicas), mode="wrap") if n else order
        for index in mine.tolist():
            # The padding depends on the number of ranks, which may change at a restart, so the position stops at n.
            self.position = min(self.position + self.num_replicas, n)
            yield index
        self._end(min(stop, n))


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Sizes of one batch: ``samples`` on this rank, which may be 0, and ``global_samples`` on all ranks together.

    ``index`` is the number of the batch in the epoch. With virtual ranks, ``samples`` are those of ``virtual_rank``.
    """

    index: int
    samples: int
    global_samples: int
    virtual_rank: int = 0
    epoch: int = 0


class GlobalBatchSampler(EpochSampler):
    """Divide batches of ``batch_size`` samples among the ranks: a step's samples do not depend on the number of ranks.

    Pass the sampler to :class:`~mpiddp.data.DataLoader` as ``batch_sampler``. With ``B`` for ``batch_size``, batch
    ``k`` has the samples ``k B`` to ``(k + 1) B`` of the epoch's order. Rank ``r`` of ``N`` takes every N-th sample of
    a batch from ``r`` on; ``B`` is at least ``N``. After :meth:`load_state_dict` batches continue from the restored
    position, with any ``N`` and ``B``, but ``len`` remains that of a whole epoch.

    ``current`` is the :class:`BatchShare` of the batch given last (with workers use :attr:`DataLoader.current
    <mpiddp.data.DataLoader.current>`). If ``N`` does not divide ``B``, ranks differ by one sample: weight their
    gradients, and sums over an epoch, by ``current.samples``. The last batch may have fewer samples than ranks. A rank
    without a sample then gets the first sample of the batch, with ``current.samples`` 0, so that all ranks take the
    step and no model sees an empty batch.

    With ``virtual_ranks`` a batch is divided among virtual ranks. A rank gets the parts of its own virtual ranks one
    after the other, as :meth:`DistributedDataParallel.steps <mpiddp.DistributedDataParallel.steps>` needs them.
    ``len`` counts the parts.

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
        *,
        virtual_ranks: int | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)
        self.batch_size = checked_batch_size(batch_size)
        self._virtual = virtual_ranks is not None
        self._parts = self.num_replicas if virtual_ranks is None else virtual_ranks
        if self.batch_size < self._parts:
            raise ValueError(
                f"batch_size is that of all ranks together: {self.batch_size} samples cannot be divided among "
                f"{self._parts} {'virtual ' * self._virtual}ranks; use {self._parts} or more, or fewer of these"
            )
        self.virtual_ranks = shares(self._parts, self.num_replicas)[self.rank]
        self.drop_last = drop_last
        self.current: BatchShare | None = None

    def __len__(self) -> int:
        n = len(self.dataset)
        return (n // self.batch_size if self.drop_last else -(-n // self.batch_size)) * len(self.virtual_ranks)

    def __iter__(self) -> Iterator[Array]:
        order, start = self._begin()
        for begin in range(start, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            if self.drop_last and len(batch) < self.batch_size:
                break
            self.position = begin + len(batch)
            for part in self.virtual_ranks:
                mine = batch[part :: self._parts]
                virtual_rank = part if self._virtual else 0
                self.current = BatchShare(begin // self.batch_size, len(mine), len(batch), virtual_rank, self.epoch)
                yield mine if len(mine) else batch[:1]
        self._end(self.position)

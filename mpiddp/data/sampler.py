"""The samplers of one process: sequential, random, and the one that groups what another gives into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from .batch_size import checked_batch_size


class SequentialSampler:
    """Visit the samples in the order in which they come.

    Parameters
    ----------
    data_source : Sized
        Only its length counts.
    """

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))


class RandomSampler:
    """Visit the samples in a random order, a new one in each iteration.

    Parameters
    ----------
    data_source : Sized
        Only its length counts.
    replacement : bool, default False
        Draw each sample independently of the others.
    num_samples : int, optional
        How many to draw; default: all. More than there are, without replacement, begins further permutations.
    generator : numpy.random.Generator or int, optional
        Where randomness comes from, or its seed. Default: fresh entropy, so that every process and every run has
        another order.

    Raises
    ------
    ValueError
        If ``num_samples`` is not positive.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: np.random.Generator | int | None = None,
    ) -> None:
        if num_samples is not None and num_samples <= 0:
            raise ValueError(f"num_samples should be a positive integer value, but got num_samples={num_samples}")
        self.data_source = data_source
        self.replacement = replacement
        self.generator = np.random.default_rng(generator)
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        """How many samples one iteration draws."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        n, left = len(self.data_source), self.num_samples
        if self.replacement and left:
            yield from self.generator.integers(n, size=left).tolist()
            return
        while n and left:
            drawn = self.generator.permutation(n)[:left].tolist()
            left -= len(drawn)
            yield from drawn


class BatchSampler:
    """Group the indices that a sampler gives into lists of equal length.

    Parameters
    ----------
    sampler : iterable of int
        Anything that gives indices and has a length.
    batch_size : int
        Indices a list.
    drop_last : bool
        Leave out the last list if it is shorter.

    Raises
    ------
    TypeError, ValueError
        If ``batch_size`` is not a positive integer.

    Notes
    -----
    ``set_epoch``, ``state_dict`` and ``load_state_dict`` are those of the sampler. A state taken between batches has
    the position behind the last full batch.

    Examples
    --------
    >>> list(BatchSampler(SequentialSampler(range(7)), batch_size=3, drop_last=False))
    [[0, 1, 2], [3, 4, 5], [6]]
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = checked_batch_size(batch_size)
        self.drop_last = drop_last

    def __len__(self) -> int:
        n = len(self.sampler)  # type: ignore[arg-type]
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a sampler that wants it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state; empty where it has none."""
        return self.sampler.state_dict() if hasattr(self.sampler, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the sampler the state that it, or one like it, had."""
        if hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state)


__all__ = ["BatchSampler", "RandomSampler", "SequentialSampler"]

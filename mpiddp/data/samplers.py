"""Samplers of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np

from mpiddp.arguments import whole


def checked_batch_size(batch_size: object) -> int:
    """Return a positive integer; the error for the tutorial's ``128 / float(size)`` names the integer."""
    if isinstance(batch_size, (float, np.floating)):
        raise TypeError(
            f"batch_size should be an integer, got the float {batch_size:g}; pass {max(int(batch_size), 1)} "
            "(divide with // instead of /)"
        )
    return whole("batch_size", batch_size, 1)


class SequentialSampler:
    """Visit the samples in order."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))


class RandomSampler:
    """Visit the samples in a random order, a new one in each iteration.

    ``generator`` has the random numbers, or is their seed. By default every process has another order.
    """

    def __init__(self, data_source: Sized, *, generator: np.random.Generator | int | None = None) -> None:
        self.data_source = data_source
        self.generator = np.random.default_rng(generator)

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(len(self.data_source)).tolist())


class BatchSampler:
    """Group the indices of a sampler, which has a length, into lists of equal length.

    State and epoch are the sampler's; a state taken between batches has the position behind the last full batch.
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
        """Return the sampler's state; empty if it has none."""
        return self.sampler.state_dict() if hasattr(self.sampler, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state on to the sampler."""
        if hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state)

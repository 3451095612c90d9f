"""A walk through an epoch's order, shared among ranks: what the distributed samplers have in common.

Imports ``distributed`` for the defaults of rank and number of ranks; nothing here communicates. Every rank computes
the same order from the same seed and takes its own part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any

from mpiddp.distributed import get_rank, get_world_size
from mpiddp.typing import Array

from .permutation import epoch_order


class EpochWalk:
    """The order of an epoch, and how far all ranks together have come in it.

    Parameters
    ----------
    dataset : Sized
        Only its length counts.
    num_replicas, rank : int, optional
        How many ranks share the order, and which of them this is. Default: the world, and this process in it.
    shuffle : bool
        Visit the samples in the order of :func:`~mpiddp.data.randperm` with ``seed + epoch``, or as they come.
    seed : int
        The same on every rank.

    Attributes
    ----------
    epoch : int
        Set by :meth:`set_epoch`.
    position : int
        How many samples of the epoch's order all ranks together have been given.
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
        """Choose the epoch, and with it the order, of the next iteration; the same epoch on every rank.

        Choosing the epoch that :meth:`load_state_dict` has restored keeps the position in it.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = self._start = 0
            self._finished = False

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, and what makes the order, as plain numbers.

        The position counts the samples of all ranks, so that any number of ranks can go on from it. Rank 0 is never
        behind another rank: save its state.
        """
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, on any number of ranks.

        Raises
        ------
        ValueError
            If the data set's length, seed or shuffle differ: then the order does, and samples would be repeated.
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
        """Return the epoch's order and the position from which to walk it; used up by one iteration."""
        self.position, self._start = self._start, 0
        return epoch_order(len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=self.epoch), self.position

    def _end(self, position: int) -> None:
        """Note that the epoch was iterated to its end, at ``position``; warn where this is the second time."""
        # Only now: a script may look at a first batch before it calls set_epoch.
        if self.shuffle and self._finished and not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch {self.epoch} was iterated a second time, in the same order; call set_epoch(epoch) on the "
                "loader or its sampler before each epoch",
                stacklevel=3,
            )
        self.position = position
        self._finished = True


__all__ = ["EpochWalk"]

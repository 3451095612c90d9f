"""Join: a rank without further inputs takes part in the communication of the other ranks until all have finished."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.distributed import ProcessGroup, ReduceOp, Work, all_reduce


class JoinHook:
    """The communication of a rank without inputs, for one `Joinable` (``torch.distributed.algorithms.JoinHook``)."""

    def main_hook(self) -> None:
        """Take part in the communication of one iteration of the ranks with inputs."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make the ranks' states equal after all ranks have joined.

        ``is_last_joiner`` is True on the ranks that joined last.
        """


class Joinable(ABC):
    """An object that communicates in every iteration, and has a `JoinHook` for ranks without inputs.

    A subclass calls ``Join.notify_join_context(self)`` once an iteration, before its own communication.
    """

    _join: "Join | None" = None
    """The enabled `Join` whose context is running with this object, or None."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for iterations in which this rank has no inputs; ``kwargs`` are those of `Join`."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group in which this object communicates."""


class Join:
    """A context for ranks with different numbers of inputs (``torch.distributed.algorithms.Join``).

    Each iteration costs an additional all-reduce of one number, and another one with ``throw_on_early_termination``.

    Parameters
    ----------
    joinables : list of Joinable
        The objects that communicate in the loop, all in one group.
    enable : bool
        If False, the context does nothing.
    throw_on_early_termination : bool
        If True, all ranks raise RuntimeError as soon as one of them has no more inputs.
    **kwargs
        Options for the ``join_hook`` of each object.

    Examples
    --------
    >>> with dist.Join([ddp]):  # doctest: +SKIP
    ...     for x, y in loader:  # of any length
    ...         train(x, y)
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("The join context manager requires at least one joinable")
        self._joinables = list(joinables)
        self._group = self._joinables[0].join_process_group
        if any(each.join_process_group is not self._group for each in self._joinables):
            raise ValueError("Using join context manager with multiple process groups")
        self._hooks = [each.join_hook(**kwargs) for each in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination

    def __enter__(self) -> "Join":
        for joinable in self._joinables:
            joinable._join = self if self._enable else None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for joinable in self._joinables:
            joinable._join = None
        if not self._enable or kind is not None:
            return
        is_last = True
        while _sum(0, self._group):
            if self._throw:
                _sum(1, self._group)
                raise RuntimeError(f"Rank {self._group.rank()} exhausted all inputs.")
            for hook in self._hooks:
                hook.main_hook()
            is_last = False
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=is_last)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Announce another iteration to the ranks that have joined. Only the first joinable of a `Join` sends.

        Returns
        -------
        Work or None
            The Work's ``result()[0]`` is an array of one element, the number of ranks with inputs. The call returns
            None outside an enabled `Join`, and for joinables that are not its first.
        """
        join = joinable._join
        if join is None or join._joinables[0] is not joinable:
            return None
        group = joinable.join_process_group
        work = all_reduce(np.ones(1, np.int64), group=group, async_op=True)
        if join._throw and _sum(0, group):
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        return work


def _sum(mine: int, group: ProcessGroup) -> int:
    total = np.array([mine], np.int64)
    all_reduce(total, group=group)
    return int(total[0])


def agree(group: ProcessGroup, reduces: bool, syncs: bool, active: bool) -> tuple[bool, bool, int]:
    """Return whether any rank reduces gradients, whether any synchronises buffers, and the highest ``active`` rank.

    All ranks of the group call this together. The last number is -1 if no rank is active.
    """
    told = np.array([reduces, syncs, group.rank() if active else -1], np.int64)
    all_reduce(told, ReduceOp.MAX, group)
    return bool(told[0]), bool(told[1]), int(told[2])

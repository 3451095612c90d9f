"""What keeps ranks together under ``DistributedDataParallel.join``: announcements, and a shadow of each iteration."""

from __future__ import annotations

import numpy as np

from mpiddp.distributed import ProcessGroup, ReduceOp, all_reduce

from .buffers import BufferSync
from .join import Join, Joinable, JoinHook
from .reducer import Reducer
from .replicas import broadcast_arrays
from .selection import Selection


def _agree(group: ProcessGroup, reduces: bool, syncs: bool, active: bool) -> tuple[bool, bool, int]:
    """Return whether the ranks with inputs reduce and synchronise buffers, and the last one of them."""
    told = np.array([reduces, syncs, group.rank() if active else -1], np.int64)
    all_reduce(told, ReduceOp.MAX, group)
    return bool(told[0]), bool(told[1]), int(told[2])


def announce(model: Joinable, reduces: bool, syncs: bool) -> tuple[int, int | None]:
    """Tell the ranks that have joined what this forward will do.

    Returns
    -------
    source : int
        The rank whose buffers count.
    active : int or None
        How many ranks have inputs; None where another joinable of the context asks for it.
    """
    work = Join.notify_join_context(model)
    _, _, source = _agree(model.join_process_group, reduces, syncs, active=True)
    if work is None:
        return source, None
    work.wait()
    return source, int(work.result()[0][0])


class Shadow(JoinHook):
    """Contributes zeros to each iteration of the other ranks, and takes their last model in the end.

    Parameters
    ----------
    reducer, buffer_sync, selection
        The model's.
    group : ProcessGroup
        The ranks that hold it.
    """

    def __init__(self, reducer: Reducer, buffer_sync: BufferSync, selection: Selection, group: ProcessGroup) -> None:
        self._reducer, self._buffer_sync, self._selection, self._group = reducer, buffer_sync, selection, group

    def main_hook(self) -> None:
        """Take part in one forward and, where it has one, its reduced backward."""
        reduces, syncs, source = _agree(self._group, False, False, active=False)
        if syncs:
            self._buffer_sync.broadcast(source, self._reducer.backwards)
        if reduces:
            self._reducer.share = 0
            try:
                self._reducer.contribute_nothing()
            finally:
                self._reducer.share = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that had inputs to the end, the last of several."""
        _, _, source = _agree(self._group, False, False, active=is_last_joiner)
        broadcast_arrays(self._selection.arrays(), self._group, source)

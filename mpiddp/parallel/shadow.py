"""What keeps ranks together under ``DistributedDataParallel.join``: announcements, and a shadow of each iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpiddp.distributed import ProcessGroup, ReduceOp, all_reduce

from .join import Join, JoinHook
from .replicas import broadcast_arrays

if TYPE_CHECKING:
    from .ddp import DistributedDataParallel


def _agree(group: ProcessGroup, reduces: bool, syncs: bool, active: bool) -> tuple[bool, bool, int]:
    """Return whether the ranks with inputs reduce and synchronise buffers, and the last one of them."""
    told = np.array([reduces, syncs, group.rank() if active else -1], np.int64)
    all_reduce(told, ReduceOp.MAX, group)
    return bool(told[0]), bool(told[1]), int(told[2])


def announce(ddp: DistributedDataParallel, reduces: bool, syncs: bool) -> int:
    """Tell the ranks that have joined what this forward will do; return the rank whose buffers count."""
    group = ddp.process_group
    work = Join.notify_join_context(ddp)
    _, _, source = _agree(group, reduces, syncs, active=True)
    if work is not None:
        work.wait()
        if not ddp._divide_by_all:
            ddp._reducer.divisor = int(work.result()[0][0])
    return source


class Shadow(JoinHook):
    """Contributes zeros to each iteration of the other ranks, and takes their last model in the end."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Take part in one forward and, where it has one, its reduced backward."""
        ddp = self._ddp
        reduces, syncs, source = _agree(ddp.process_group, False, False, active=False)
        if syncs:
            broadcast_arrays(ddp._buffer_sync.arrays(), ddp.process_group, source)
            ddp._backwards_at_sync = ddp._reducer.backwards
        if reduces:
            ddp._reducer.share = 0
            try:
                ddp._reducer.contribute_nothing()
            finally:
                ddp._reducer.share = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that had inputs to the end, the last of several."""
        ddp = self._ddp
        _, _, source = _agree(ddp.process_group, False, False, active=is_last_joiner)
        arrays = [p.data for name, p in ddp.module.named_parameters() if name not in ddp._ignored]
        broadcast_arrays(arrays + ddp._buffer_sync.arrays(), ddp.process_group, source)

"""mpiddp's default group as torch's: made with it and ended with it, unless the program has made it before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from mpiddp import distributed as mpiddp

_ours = False
_kept = False


def begin(timeout: timedelta, rank: int = -1, size: int = -1) -> mpiddp.ProcessGroup:
    """Return the group of all ranks.

    Parameters
    ----------
    timeout : timedelta
        How long operations may take, where the group is made here.
    rank, size : int, default -1
        What the program believes; a contradiction to MPI is an error.
    """
    global _ours
    if not mpiddp.is_initialized():
        mpiddp.init_process_group(timeout=timeout, rank=rank, world_size=size)
        _ours = True
    found = mpiddp.group.WORLD
    assert found is not None
    if (rank, size) not in ((-1, -1), (found.rank(), found.size())):
        raise mpiddp.DistError(
            f"init_process_group was told rank {rank} of {size}, and MPI says rank {found.rank()} of {found.size()}:"
            " start one process for each rank with mpirun or srun, and leave rank and world_size out"
        )
    return found


def end(group: mpiddp.ProcessGroup) -> None:
    """End the group of all ranks, and with it all others."""
    global _ours
    if _ours and not _kept:
        _ours = False
        if mpiddp.is_initialized():
            mpiddp.destroy_process_group()


def free(group: mpiddp.ProcessGroup) -> None:
    """End a group of some ranks."""
    if not _kept and mpiddp.is_initialized():
        mpiddp.destroy_process_group(group)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let torch destroy its groups, and mpiddp's stay."""
    global _kept
    _kept = True
    try:
        yield
    finally:
        _kept = False

"""mpiddp's default group as torch's: made with it and ended with it, unless the program has made it before."""

from __future__ import annotations

import warnings
from datetime import timedelta

from mpiddp import distributed as mpiddp
from mpiddp.distributed import groups

from . import cuda

_ours = False


def begin(timeout: timedelta, rank: int = -1, size: int = -1) -> mpiddp.ProcessGroup:
    """Return the group of all ranks; raise if rank or size, if not -1, contradict MPI.

    ``timeout`` holds where the group is made here.
    """
    global _ours
    if not mpiddp.is_initialized():
        mpiddp.init_process_group(timeout=timeout, rank=rank, world_size=size, device_id=cuda.chosen())
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
    if _ours and group is mpiddp.group.WORLD:
        _ours = False
        free(group)


def free(group: mpiddp.ProcessGroup) -> None:
    """End a group; unfinished operations, as after a timeout, are given up, as by torch's own backends."""
    try:
        mpiddp.destroy_process_group(group)
    except mpiddp.DistError as error:
        warnings.warn(f"{error}; they are given up", stacklevel=2)
        groups.discard(group)

"""mpiddp's default group under that of torch: both are made and ended together, unless the program has made ours."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import distributed_c10d as c10d

from mpiddp import distributed, settings
from mpiddp.distributed import init
from mpiddp.faults.meeting import Meeting
from mpiddp.mpi.finalize import running
from mpiddp.mpi.lazy import MPI

from . import cuda
from .options import seconds

_ours = False
_options: dict[str, Any] = {"comm": None}
"""The arguments of `use`, for init_process_group."""


def use(comm: MPI.Intracomm | None, on_error: Literal["raise", "abort"] | None = None) -> None:
    """Let torch's next default group have the ranks of ``comm``.

    These ranks call this, and then ``torch.distributed.init_process_group``.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        None stands for the ranks of ``MPI.COMM_WORLD`` again.
    on_error : str, optional
        As for `mpiddp.distributed.init_process_group`.

    Examples
    --------
    >>> mpiddp.torch.use(MPI.COMM_WORLD.Split(color))  # doctest: +SKIP
    >>> torch.distributed.init_process_group("mpiddp")  # doctest: +SKIP
    """
    _options.update(comm=comm, on_error=on_error)


def begin(timeout: timedelta, rank: int = -1, size: int = -1) -> distributed.ProcessGroup:
    """Return the group of all ranks, made with ``timeout`` if there is none; DistError if MPI has other numbers.

    -1 as rank or size agrees with any number.
    """
    global _ours
    if not distributed.is_initialized():
        if running() and _options["comm"] is None:
            # If MPI has not started, nothing can interrupt the wait for the others: they meet in MPI_Init.
            meeting = Meeting(MPI.COMM_WORLD, seconds(timeout) or settings.default_timeout_s())
            with meeting.held():
                meeting.gather()
        distributed.init_process_group(timeout=timeout, rank=rank, world_size=size, device_id=cuda.chosen(), **_options)
        _ours = True
    found = distributed.group.WORLD
    assert found is not None
    if (rank, size) not in ((-1, -1), (found.rank(), found.size())):
        raise distributed.DistError(
            f"init_process_group was told rank {rank} of {size}, and MPI says rank {found.rank()} of {found.size()}:"
            " start one process for each rank with mpirun or srun, and leave rank and world_size out"
        )
    return found


def begin_beside(ranks: Sequence[int], timeout: timedelta) -> None:
    """Make the group of all ranks before a group of ``ranks``, if torch's default group has another backend.

    The ranks of such a default group may have met at an address, without MPI. All ranks have to start MPI together.
    """
    if distributed.is_initialized():
        return
    rank, size = c10d.get_rank(), c10d.get_world_size()
    if len(ranks) < size:
        raise distributed.DistError(
            f'new_group("mpiddp") of {len(ranks)} of {size} ranks, before MPI has started on all of them: make one of'
            ' all ranks first, or let the default group meet through MPI: init_process_group(..., init_method="mpi://")'
        )
    begin(timeout, rank, size)


def end(group: distributed.ProcessGroup) -> None:
    """End a group, unless it is the group of all ranks and the program has made it itself.

    With the group of all ranks all other groups end. Unfinished operations, as after a timeout, are given up, as by
    torch's own backends.
    """
    global _ours
    if group is distributed.group.WORLD:
        if not _ours:
            return
        _ours = False
    try:
        distributed.destroy_process_group(group)
    except distributed.MismatchError:
        raise  # the group has ended
    except distributed.DistError as error:
        warnings.warn(f"{error}; they are given up", stacklevel=2)
        init.give_up(group)


def shrink_group(ranks_to_exclude: Sequence[int] = ()) -> None:
    """Make torch's default group anew without failed ranks, and without ``ranks_to_exclude``.

    Ranks are numbered anew in the old order, and all other groups end. A DistributedDataParallel has to wrap its module
    again. ValueError if there is no such rank, or if this rank is to be excluded.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     loss.backward()
    ... except RankFailedError as error:
    ...     shrink_group(error.ranks)
    ...     model = DistributedDataParallel(model.module)
    """
    backend = c10d.get_backend()
    timeout = c10d._get_default_group().timeout
    distributed.shrink_group(ranks_to_exclude)
    c10d.destroy_process_group()
    c10d.init_process_group(backend, init_method="mpi://", timeout=timeout)

"""mpiddp's default group, which torch's default group uses.

Both groups are made and ended together, unless the program has made mpiddp's group itself.
"""

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
"""The arguments of `use`, which `begin` passes to mpiddp's init_process_group."""


def use(comm: MPI.Intracomm | None, on_error: Literal["raise", "abort"] | None = None) -> None:
    """Let torch's later default groups have the ranks of ``comm``, until the next call of `use`.

    The ranks of ``comm`` call this, and then ``torch.distributed.init_process_group``.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The communicator of the ranks. None stands for ``MPI.COMM_WORLD``, as before the first call of `use`.
    on_error : str, optional
        The reaction to errors, as in `mpiddp.distributed.init_process_group`.

    Examples
    --------
    >>> mpiddp.torch.use(MPI.COMM_WORLD.Split(color))  # doctest: +SKIP
    >>> torch.distributed.init_process_group("mpiddp")  # doctest: +SKIP
    """
    _options.update(comm=comm, on_error=on_error)


def begin(timeout: timedelta, rank: int = -1, size: int = -1) -> distributed.ProcessGroup:
    """Return the group of all ranks. If there is none yet, make it with ``timeout``.

    DistError if torch was told another rank or size than MPI has. -1 says that torch was told none.
    """
    global _ours
    if not distributed.is_initialized():
        if running() and _options["comm"] is None:
            # Wait for the other ranks with a time limit. Before MPI has started that is not possible: the ranks would
            # wait for each other in MPI_Init, which nothing can interrupt.
            meeting = Meeting(MPI.COMM_WORLD, seconds(timeout) or settings.default_timeout_s())
            with meeting.held():
                meeting.gather()
        distributed.init_process_group(timeout=timeout, rank=rank, world_size=size, device_id=cuda.chosen(), **_options)
        _ours = True
    found = distributed.group.WORLD
    assert found is not None
    if rank not in (-1, found.rank()) or size not in (-1, found.size()):
        raise distributed.DistError(
            f"init_process_group was told rank {rank} of {size}, and MPI says rank {found.rank()} of {found.size()}:"
            " start one process for each rank with mpirun or srun, and leave rank and world_size out"
        )
    return found


def begin_beside(ranks: Sequence[int], timeout: timedelta) -> None:
    """Make mpiddp's group of all ranks before a group of ``ranks``, if torch's default group has another backend.

    The ranks of such a default group may have found each other by an address, so that MPI has not started yet. All
    ranks have to start it together: DistError if ``ranks`` are only some of them.
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
    """End a group, unless it is the group of all ranks and the program has made that group itself.

    When the group of all ranks ends, all other groups end, too. If operations are unfinished, as after a timeout, they
    are given up with a warning; torch's own backends give them up, too.
    """
    global _ours
    if group is distributed.group.WORLD:
        if not _ours:
            return
        _ours = False
    try:
        distributed.destroy_process_group(group)
    except distributed.MismatchError:
        raise  # the group has ended nevertheless
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

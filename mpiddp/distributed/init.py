"""The beginning and the end of process groups. Ranks come from MPI, without address, port or rendezvous."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from datetime import timedelta
from typing import Any, Literal

from mpiddp import launchers, settings
from mpiddp.algorithms import plan as planning
from mpiddp.algorithms.gpu import table as device_table
from mpiddp.device import choice
from mpiddp.faults import leaving, monitor, this_job
from mpiddp.faults.abort import time_limit
from mpiddp.faults.job import Job
from mpiddp.mpi.finalize import finalized, running
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.recorder import warn
from mpiddp.mpi.requests import seconds
from mpiddp.mpi.world import Claims

from . import backends, debug, groups, parting
from .backends import check_backend
from .groups import GroupLike, ProcessGroup, register
from .new_groups import among


def is_available() -> bool:
    """Return True. PyTorch can be built without ``torch.distributed``, and returns False then."""
    return True


def _check_comm(comm: object) -> None:
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError(
            "comm must be the communicator that this rank is in, got MPI.COMM_NULL, as Split gives for MPI.UNDEFINED"
            " and Create outside of the group: give these ranks a communicator too, such as that of another color"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py intracommunicator such as MPI.COMM_WORLD, got {comm!r}")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: int | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    on_error: Literal["raise", "abort"] | None = None,
) -> None:
    """Start MPI, if the program has not, and make the default process group of all its ranks.

    Parameters
    ----------
    backend : str, optional
        None or "mpi"; "gloo", an alias of "mpi"; "nccl", for CuPy arrays; or by device, as in "cpu:gloo,cuda:nccl".
    timeout : timedelta or float, optional
        The limit of an operation, in seconds; by default ``MPIDDP_TIMEOUT``, or 30 minutes.
    world_size, rank : int, default -1
        The numbers that the launcher has given anyway. A contradiction is an error. With the backend "mpi" and several
        ranks the numbers are ignored with a warning, as in torch.
    device_id : int, optional
        This rank's GPU. By default, if the program has imported CuPy and has not used a GPU yet, it is the rank's
        number on its node modulo the number of visible GPUs.
    comm : mpi4py intracommunicator, optional
        A communicator of the ranks of the default group, by default ``MPI.COMM_WORLD``. Only its ranks call this. No
        other rank has to take part, neither in later calls nor at the end.
    on_error : str, optional
        The effect of a timeout, of ranks that disagree, or of a lost rank: "raise" an error on all
        ranks, after which the group can only be destroyed, or "abort", which ends the whole program. By default
        "raise" with ``comm``, and "abort" without.
    init_method, store, group_name, pg_options
        Without effect.

    Raises
    ------
    ValueError
        If there is a default group already, the backend or ``on_error`` is unknown, or ``comm`` is ``MPI.COMM_NULL``.
    DistTimeoutError
        If other ranks have not called this function in time, and ``on_error`` is "raise".
    DistError
        If the job cannot work as it was launched. The text says what to do.

    Examples
    --------
    A program begins with ``import mpiddp as dist`` and ``dist.init_process_group()``.

    >>> dist.init_process_group()
    Traceback (most recent call last):
    ValueError: trying to initialize the default process group twice!
    """
    if groups.is_initialized():
        raise ValueError("trying to initialize the default process group twice!")
    kind = check_backend(backend)
    limit_s = seconds(timeout, of_group=True)
    timeout_s = settings.default_timeout_s() if limit_s is None else limit_s
    debug_level = settings.debug_level()
    settings.deterministic()  # it raises now if the variable is wrong, and not at its first use
    if on_error not in (None, "raise", "abort"):
        raise ValueError(f'on_error must be "raise" or "abort", got {on_error!r}')
    if comm is not None:
        _check_comm(comm)
    elif on_error == "raise":
        comm = MPI.COMM_WORLD
    raises = comm is not None and on_error != "abort"
    _choose_device(device_id)
    leaving.limit_s = timeout_s
    # A timer ends the program. If errors are raised instead, the first meeting of the ranks has a limit of its own.
    with contextlib.nullcontext() if raises else time_limit(timeout_s, "init_process_group"):
        assigned_by_mpi = backend is not None and backend.lower() == "mpi"
        debug.configure(debug_level)
        planning.overrides.cache_clear()  # the environment may have another choice of algorithms by now
        planning.overrides()
        claims = Claims(rank, world_size, comm is not None, "raise" if raises else "abort", assigned_by_mpi)
        _start(claims, comm, timeout_s, kind)


def _start(claims: Claims, comm: MPI.Intracomm | None, timeout_s: float, backend: str) -> None:
    first = this_job.current() is None
    while True:
        try:
            job = this_job.start(claims, comm, timeout_s)
            begin(job, None, timeout_s, backend, comm)
            if len(job.world.running) == job.world.size:
                job.failures.agree()  # no rank goes on from a start that another one has to repeat
            break
        except Exception as error:
            failed = this_job.current()
            if failed is None or not failed.failures.caused(error):
                this_job.end(together=False)
                raise
            groups.discard()
    if first and job.world.rank == 0:
        for unknown in settings.unknown_variables():
            warn(unknown)
    now, before = job.world.size, (MPI.COMM_WORLD if comm is None else comm).size
    if first and now < before and job.world.rank == 0:
        warn(f"{before - now} of {before} ranks died during the start; {now} go on")


def begin(
    job: Job, comm: MPI.Intracomm | None, timeout_s: float, backend: str, given: MPI.Intracomm | None = None
) -> ProcessGroup:
    """Make the default group of ``comm``, or of all ranks that are alive. Those ranks call this together.

    ``given`` is the program's own communicator, if it has given one.
    """
    world = job.world
    if comm is None and len(world.running) < world.size:
        own = among(world.comm, world.running)
    else:
        own = (comm or world.comm).Dup()
    link = monitor.connect(job, own, timeout_s)
    device_table.learn(link)
    backends.connect(link, backend)
    ranks = world.ranks[: link.size]
    return register(ProcessGroup(link, "default_pg", ranks, given or comm or own), default=True)


def _choose_device(device_id: int | None) -> None:
    """Make this rank's GPU current, before MPI starts, because some libraries keep the GPU that is current then."""
    launched = launchers.launch()
    if device_id is not None:
        choice.set_device(device_id)
    elif launched is not None and launched.local_rank is not None:
        choice.choose(launched.local_rank)


def destroy_process_group(group: GroupLike = None) -> None:
    """Free a group; its ranks call this together. None or ``group.WORLD`` frees all groups.

    If all groups are freed, `init_process_group` may be called again. DistError if operations of the group are pending.
    The ranks compare their last calls, and wait for each other for 2 seconds at most. If the calls differ, it is a
    `MismatchError`, and the group is gone nevertheless.

    Examples
    --------
    >>> pair = dist.new_group([0, 1])
    >>> dist.destroy_process_group(pair)
    """
    doomed = groups.doomed(group)
    default = groups.default_group()
    error = parting.part(doomed)
    together = all(each._link.comms for each in doomed)
    groups.destroy(doomed)
    if default in doomed:
        this_job.end(together)
    if error is not None:
        raise error


def give_up(group: ProcessGroup) -> None:
    """End a group on this rank alone. With the default group, all groups end."""
    groups.discard(group)
    if not groups.is_initialized():
        this_job.end(together=False)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank on its node, from 0.

    Before `init_process_group` it is LOCAL_RANK, which ``import mpiddp`` takes from the launcher. Without LOCAL_RANK
    the result is ``fallback_rank``; if this is None, it is a RuntimeError.

    Examples
    --------
    >>> dist.get_node_local_rank() <= dist.get_rank()
    True
    """
    job = this_job.current()
    if job is not None:
        return job.world.local_rank
    announced = launchers.rank_variables().get("LOCAL_RANK", fallback_rank)
    if announced is None:
        raise RuntimeError(
            "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow get_node_local_rank to work,"
            " or call init_process_group first."
        )
    return announced


def get_backend(group: GroupLike = None) -> str:
    """Return "nccl" if the group sends arrays on GPUs by NCCL, else "mpi"; ValueError on a rank that is no member.

    Examples
    --------
    >>> dist.get_backend()
    'mpi'
    """
    return backends.backend_of(groups.known(group)._link)


def get_backend_config(group: GroupLike = None) -> str:
    """Return a group's backend for each kind of device; errors are those of `get_backend`.

    Examples
    --------
    >>> dist.get_backend_config()
    'cpu:mpi,cuda:mpi'
    """
    return f"cpu:mpi,cuda:{get_backend(group)}"


def _mention_timeline() -> None:
    worked = running() or finalized()
    first = launchers.rank_variables().get("RANK", 0) == 0
    # The module is looked up by its name, because it is in a layer above this one.
    traced = any(name.endswith("parallel.timeline") for name in sys.modules)
    if settings.timeline() and worked and first and not traced:
        warnings.warn(
            "MPIDDP_TIMELINE traces the steps of DistributedDataParallel, and this program made none: nothing was"
            " written (MPIDDP_DEBUG=INFO logs every operation)",
            stacklevel=1,
        )


atexit.register(_mention_timeline)
os.register_at_fork(after_in_child=lambda: groups.disown(this_job.FORKED) if groups.is_initialized() else None)

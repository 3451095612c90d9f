"""A smaller default group: the ranks go on without failed ranks, or without ranks that the program excludes."""

from collections.abc import Sequence
from typing import Any

from mpiddp.faults import this_job
from mpiddp.faults.abort import time_limit

from . import groups, init
from .backends import backend_of
from .groups import GroupLike, ProcessGroup, default_group
from .new_groups import by_members, checked_ranks

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: GroupLike = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make the default group anew, without some ranks, and return it.

    After a `RankFailedError` all survivors call it, and failed ranks are left out whether they are listed or not.
    Without a failure, the ranks that are not listed call it. Ranks are numbered anew, in the old order, and all other
    groups end. Ranks survive the death of another one only under Open MPI's ``mpirun --with-ft ulfm``, and only if a
    signal has ended that rank, as the system does when memory runs out. The loss of a node ends the job.

    Parameters
    ----------
    ranks_to_exclude : sequence of int
        Global ranks.
    group : ProcessGroup, optional
        None or the group of all ranks; ValueError for another.
    shrink_flags : int
        With ``SHRINK_ABORT`` pending operations are abandoned, as they are after a failure. With the default they are a
        `DistError`.
    pg_options
        Without effect.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     dist.all_reduce(x)
    ... except dist.RankFailedError as error:
    ...     dist.shrink_group(error.ranks)
    """
    old = default_group()
    if group is not None and group is not old:
        raise ValueError(f"shrink_group makes the group of all ranks smaller, got {group!r}: new_group makes others")
    excluded = set(checked_ranks(ranks_to_exclude, old.size())) if len(ranks_to_exclude) else set()
    if old.rank() in excluded:
        raise ValueError(f"rank {old.rank()} is to be excluded, and those that are do not call shrink_group")
    link, backend, job = old._link, backend_of(old._link), old._monitor.job
    failed = job.failures.happened()
    if not failed and not shrink_flags & SHRINK_ABORT:
        groups.doomed()  # it raises DistError if operations are pending
    left = [rank for rank in range(old.size()) if rank not in excluded]
    comm = None if failed else by_members(old, left, "shrink_group", lambda made: made)
    groups.discard()
    while True:
        with time_limit(link.timeout_s, "shrink_group"):
            if failed:
                job, comm = this_job.regroup(), None
            try:
                return init.begin(job, comm, link.timeout_s, backend)
            except Exception as error:
                failed = job.failures.caused(error)
                if not failed:  # otherwise another rank has failed meanwhile, and the survivors try again
                    raise


def survivable() -> bool:
    return default_group()._monitor.survivable

"""A barrier that names missing ranks.

Every rank tells rank 0 that it has come. Rank 0 answers when all ranks have come, or when its time is up, so that a
late rank finds the answer. These messages go by `Liveness`, on a communicator of its own. So they are not confused with
messages of the group, and the group can go on with collectives after the error.
"""

from collections.abc import Callable
from datetime import timedelta

from mpiddp.errors import DistTimeoutError
from mpiddp.faults.liveness import Liveness, Tag
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.requests import poll_until, seconds

from .dispatch import calling
from .groups import GroupLike, ProcessGroup, member

_NONE = (0, 0)
"""The numbers in `Liveness.barriers` of a rank that has told of no barrier yet."""


def monitored_barrier(
    group: GroupLike = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank has called this, and name those that have not when the time is up.

    Parameters
    ----------
    group : ProcessGroup, optional
        All ranks by default.
    timeout : timedelta or float, optional
        The limit in seconds, by default that of the group. Rank 0 waits so long for the others, and each of them waits
        so long for the answer of rank 0.
    wait_all_ranks : bool, default False
        Name all missing ranks, instead of the first.

    Raises
    ------
    DistTimeoutError
        On rank 0, with the missing ranks; elsewhere with a pointer to rank 0.

    Examples
    --------
    >>> dist.monitored_barrier(timeout=10)
    """
    group = member(group, "monitored_barrier")
    if group is None:
        return
    given_s, liveness = seconds(timeout), group._monitor.job.liveness
    timeout_s = group._link.timeout_s if given_s is None else given_s
    group._monitored_barriers += 1
    call = Call(group._link.members, "monitored_barrier", peers=group._link.others)
    with calling(group, call):
        if group.rank() == 0:
            _gather(group, liveness, timeout_s, wait_all_ranks)
        else:
            _report(group, liveness, timeout_s)


def _wait(group: ProcessGroup, liveness: Liveness, done: Callable[[], bool], timeout_s: float) -> bool:
    def looked() -> bool:
        liveness.progress()
        return done()

    return poll_until(looked, Operation(Call(group._link.members, "monitored_barrier", peers=())), timeout_s)


def _report(group: ProcessGroup, liveness: Liveness, timeout_s: float) -> None:
    number, first = group._monitored_barriers, (group._link.id, group._link.ranks[0])
    liveness.send(first[1], Tag.BARRIER, (group._link.id, number, 0))
    # Rank 0 may have begun to wait later, and answer when this rank has given up.
    _wait(group, liveness, lambda: liveness.barriers.get(first, _NONE)[0] >= number, timeout_s)
    # Rank 0 has not passed this barrier, nor a later one without this rank.
    if liveness.barriers.get(first, _NONE)[1] < number:
        raise DistTimeoutError(
            f"Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but received errors while waiting"
            " for send/recv from rank 0. Please check rank 0 logs for faulty rank. (Timed out)"
        )


def _gather(group: ProcessGroup, liveness: Liveness, timeout_s: float, wait_all_ranks: bool) -> None:
    number, link = group._monitored_barriers, group._link
    missing = list(range(1, link.size))

    def has_come(rank: int) -> bool:  # a rank with a shorter timeout may be in a later barrier
        return liveness.barriers.get((link.id, link.ranks[rank]), _NONE)[0] >= number

    def all_have_come() -> bool:
        while missing and has_come(missing[-1]):
            missing.pop()
        return not missing

    if timeout_s > 0 and not _wait(group, liveness, all_have_come, timeout_s):
        missing = [rank for rank in missing if not has_come(rank)]
    group._passed_barrier = group._passed_barrier if missing else number
    for rank in link.others:
        liveness.send(rank, Tag.BARRIER, (link.id, number, group._passed_barrier))
    if missing:
        raise DistTimeoutError(_explain(group, missing, timeout_s, wait_all_ranks))


def _explain(group: ProcessGroup, missing: list[int], timeout_s: float, wait_all_ranks: bool) -> str:
    names = [group.ranks[rank] for rank in missing]
    milliseconds = f"{timeout_s * 1000:.0f} ms"
    if timeout_s <= 0 and not wait_all_ranks:
        return (
            f"Rank {group.ranks[0]} timed out in monitoredBarrier after {milliseconds}.\n"
            " No ranks successfully processed in monitoredBarrier. (Timed out)"
        )
    who = f"Ranks {', '.join(map(str, names))}" if wait_all_ranks and len(names) > 1 else f"Rank {names[0]}"
    return f"[Rank {group.ranks[0]}]: {who} failed to pass monitoredBarrier in {milliseconds} (Timed out)"

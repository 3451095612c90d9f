"""A barrier that names missing ranks.

Every rank reports to rank 0, which answers when all have, or its time is up: a late rank finds the answer. The group's
collectives go on.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np

from mpiddp.errors import DistTimeoutError
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.p2p import ANY_SOURCE, Receive, code_of
from mpiddp.mpi.requests import poll_until, seconds
from mpiddp.mpi.work import Work
from mpiddp.typing import Array

from .dispatch import calling
from .groups import GroupLike, ProcessGroup, member

_PASSED, _FAILED = 1, 0


def monitored_barrier(
    group: GroupLike = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank has called it, and name those that have not when the time is up.

    Parameters
    ----------
    group : ProcessGroup, optional
        All ranks by default.
    timeout : timedelta or float, optional
        The limit, in seconds; rank 0's counts. By default the group's.
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
    given_s = seconds(timeout)
    timeout_s = group._link.timeout_s if given_s is None else given_s
    group._monitored_barriers += 1
    with calling(group, _call(group, group._link.others)):
        if group.rank() == 0:
            _gather(group, timeout_s, wait_all_ranks)
        else:
            _report(group, timeout_s)


def _send(group: ProcessGroup, to: int, *numbers: int) -> Work:
    mailbox, message = group._mailbox, np.array(numbers)
    return mailbox.isend(message, to, code_of(message, mailbox.private_tag), _operation(group, ()))


def _call(group: ProcessGroup, peers: tuple[int, ...]) -> Call:
    return Call(group._link.members, "monitored_barrier", peers=peers)


def _operation(group: ProcessGroup, peers: tuple[int, ...]) -> Operation:
    return Operation(_call(group, peers))


def _receive(group: ProcessGroup, source: int, message: Array) -> Receive:
    mailbox = group._mailbox
    peers = group._link.others if source == ANY_SOURCE else (group._link.ranks[source],)
    return mailbox.irecv(message, source, code_of(message, mailbox.private_tag), _operation(group, peers))


def _arrived(posted: Work) -> bool:
    """Raise if no message will arrive."""
    return posted.is_completed() and posted.wait()


def _report(group: ProcessGroup, timeout_s: float) -> None:
    number, answer = group._monitored_barriers, np.zeros(2, np.int64)
    sent = _send(group, 0, number)
    receive = _receive(group, 0, answer)

    def answered() -> bool:
        nonlocal receive
        while _arrived(receive):
            if answer[0] == number:
                return True
            receive = _receive(group, 0, answer)  # this answer was of an earlier barrier, which failed
        return False

    # Rank 0's limit counts: it may begin to wait later.
    in_time = poll_until(answered, _operation(group, ()), timeout_s)
    if not in_time:
        group._mailbox.withdraw(receive)
    if not in_time or answer[1] == _FAILED:
        raise DistTimeoutError(
            f"Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but received errors while waiting"
            " for send/recv from rank 0. Please check rank 0 logs for faulty rank. (Timed out)"
        )
    sent.wait()


def _gather(group: ProcessGroup, timeout_s: float, wait_all_ranks: bool) -> None:
    number, reports, message = group._monitored_barriers, group._monitored_reports, np.zeros(1, np.int64)
    others = range(1, group.size())
    # A rank with a shorter timeout may be ahead.
    awaited = {rank for rank in others if reports.get(rank, 0) < number}
    # A poll tests one request, not one for each rank.
    receive = _receive(group, ANY_SOURCE, message) if awaited else None

    def all_have_come() -> bool:
        nonlocal receive
        while receive is not None and _arrived(receive):
            reports[receive.sender] = int(message[0])
            if message[0] >= number:  # else it belongs to a failed barrier
                awaited.discard(receive.sender)
            receive = _receive(group, ANY_SOURCE, message) if awaited else None
        return not awaited

    if timeout_s > 0:
        poll_until(all_have_come, _operation(group, ()), timeout_s)
    missing = sorted(awaited)
    if receive is not None:
        group._mailbox.withdraw(receive)
    answers = [_send(group, rank, number, _FAILED if missing else _PASSED) for rank in others]
    for each in answers:
        each.wait()
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

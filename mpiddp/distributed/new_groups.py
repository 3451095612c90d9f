"""New groups, made from the communicator of a group that exists.

The ranks of that group compare what they want to make, and all get the same error if they disagree. Only `by_members`
compares nothing.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.errors import DistError, DistTimeoutError
from mpiddp.faults import monitor
from mpiddp.faults.calls import make_call, mismatch
from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.requests import Steps, seconds

from .backends import backend_of, check_backend, connect
from .dispatch import calling, expect_own_thread, submit
from .groups import GroupMember, ProcessGroup, as_rank, default_group, get_pg_count, member, register

T = TypeVar("T")


def checked_ranks(ranks: object, world_size: int) -> list[int]:
    """Return a list of ranks; TypeError or ValueError unless they are distinct and in the world."""
    if not isinstance(ranks, (list, tuple, range)) or not ranks:
        raise TypeError(f"a group needs a non-empty list of ranks, got {ranks!r}")
    checked = [as_rank(rank) for rank in ranks]
    for rank in checked:
        if not 0 <= rank < world_size:
            raise ValueError(
                "The new group's rank should be within the world_size set by init_process_group:"
                f" got {rank}, the world has ranks 0 to {world_size - 1}"
            )
    if len(set(checked)) != len(checked):
        raise ValueError(f"The new group's ranks must be distinct, got {checked}")
    return checked


def _odd_rank(parent: Link, text: str) -> Steps:
    """Return a rank with another text than the first one's; 0 if all are equal."""
    # Ranks compare checksums first, because ten thousand ranks' lists of ten thousand ranks would not fit into memory.
    fingerprints = np.empty(parent.size, np.int64)
    yield parent.now.Iallgather(np.array([zlib.crc32(text.encode())]), fingerprints)
    # A late rank finds the first step complete, even if the other ranks have given up after their time limit. Then it
    # waits in the barrier until its own limit, and does not block in MPI without the others.
    yield parent.later.Ibarrier()
    return int((fingerprints != fingerprints[0]).argmax())


def among(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Make a communicator of ``ranks``; collective over them."""
    whole = comm.Get_group()
    members = whole.Incl(ranks)
    try:
        # The tag is equal on all members, and tells apart groups that are made at the same time.
        return MPI.Intracomm(comm.Create_group(members, zlib.crc32(repr(list(ranks)).encode()) % 30_000))
    finally:
        members.Free()
        whole.Free()


Make: TypeAlias = "Callable[[MPI.Intracomm], ProcessGroup]"
"""A function that makes a group of a communicator's ranks, which call it together."""


def maker(parent: ProcessGroup, timeout: timedelta | float | None, backend: str | None, name: str | None) -> Make:
    """Check the program's arguments for a group of ranks of ``parent``; return the function that makes the group."""
    kind, given_s = check_backend(backend, backend_of(parent._link)), seconds(timeout, of_group=True)

    def make(comm: MPI.Intracomm) -> ProcessGroup:
        whole = default_group()
        timeout_s = whole._link.timeout_s if given_s is None else given_s
        link = monitor.connect(whole._monitor.job, comm, timeout_s)
        connect(link, kind)
        # The default group may lack ranks of the world.
        global_rank_of = dict(zip(whole._link.ranks, whole.ranks, strict=True))
        ranks = tuple(global_rank_of[rank] for rank in link.ranks)
        return register(ProcessGroup(link, name or "undefined", ranks, comm))

    return make


def _without_waiting(make: Callable[[], T], what: Operation) -> T:
    """Call ``make``, which blocks in MPI, while this rank keeps polling; DistError if MPI has no communicator left."""
    what.end = 0.0  # the call goes on, after the ranks have agreed
    try:
        made = requests.run_in_thread(make, what)
    except MPI.Exception as error:
        raise DistError(
            f"{what.call.name}: MPI could not make the communicators of another group ({error}); {get_pg_count()}"
            " groups are alive in this process and each has several communicators: free those that are not needed any"
            " more with destroy_process_group(group)"
        ) from error
    what.end = monotonic()
    return made


def agree(parent: ProcessGroup, what: str, value: object, then: Callable[[], Any] = lambda: None) -> Any:
    """Raise `MismatchError` on every rank of ``parent`` if ``value`` has another repr on one of them.

    The check is a call of the group: ranks compare it, and reports name it. After it ``then`` is called, which blocks
    in MPI, and its result is returned. All ranks have come by that time. Otherwise a thread might still wait in MPI
    when the program ends, and crash in MPI_Finalize.
    """
    link, text = parent._link, f"{what} with {value!r}"
    expect_own_thread(link.busy, parent)
    work = submit(parent, planning.plain(link, _odd_rank, make_call(link, what)), (text,), ())
    try:
        work.wait()
    except DistTimeoutError as error:
        link.abort(error)  # later calls would wait behind the exchange, which stays in the queue
        raise
    odd = work._value

    def make() -> Any:
        if odd:
            first, other = link.now.bcast(text, 0), link.now.bcast(text, odd)
            raise mismatch(link, link.ranks[0], first, link.ranks[odd], other)
        return then()

    return _without_waiting(make, work._operation)


def split(parent: ProcessGroup, parts: Sequence[Sequence[int]], what: str, make: Make) -> ProcessGroup | None:
    """Make a group of each of ``parts``; return this rank's group, or None if the rank is in no part."""
    me = parent.rank()
    mine = next((index for index, part in enumerate(parts) if me in part), None)

    def make_mine() -> ProcessGroup | None:
        color, key = (MPI.UNDEFINED, 0) if mine is None else (mine, parts[mine].index(me))
        comm = parent._link.now.Split(color, key)
        return None if comm == MPI.COMM_NULL else make(MPI.Intracomm(comm))

    made: ProcessGroup | None = agree(parent, what, parts, make_mine)
    return made


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    """Make a group of some ranks.

    All ranks of the default group call it, members or not, and for several groups in the same order. A rank that is no
    member gets ``GroupMember.NON_GROUP_MEMBER`` (None with ``use_local_synchronization``).

    Parameters
    ----------
    ranks : sequence of int, optional
        Global ranks, equal on all ranks, else `MismatchError` with both lists. All ranks by default.
    timeout : timedelta or float, optional
        The limit of the group's operations, in seconds; by default that of the default group.
    backend : str, optional
        As for `init_process_group`; by default that of the default group.
    use_local_synchronization : bool, default False
        Only the members call, and their lists are not compared. Ranks may make several groups in different orders, as
        long as none wait in a circle.
    group_desc : str, optional
        A name for errors and reports.
    sort_ranks : bool, default True
        Number the members in the order of their global ranks, else in that of ``ranks``.
    pg_options, device_id
        Without effect.

    Examples
    --------
    >>> first = dist.new_group([0])
    >>> first == dist.GroupMember.NON_GROUP_MEMBER or first.size() == 1
    True
    """
    parent = default_group()
    chosen = list(range(parent.size())) if ranks is None else checked_ranks(ranks, parent.size())
    if sort_ranks:
        chosen.sort()
    make = maker(parent, timeout, backend, group_desc)
    if not use_local_synchronization:
        made = split(parent, [chosen], "new_group", make)
        return GroupMember.NON_GROUP_MEMBER if made is None else made
    if parent.rank() not in chosen:
        return None
    return by_members(parent, chosen, "new_group", make)


def by_members(parent: ProcessGroup, ranks: Sequence[int], what: str, make: Callable[[MPI.Intracomm], T]) -> T:
    """Make a communicator of some ranks of a group, which alone call this; return what ``make`` makes of it."""
    others = tuple(parent._link.ranks[rank] for rank in ranks if rank != parent.rank())
    with calling(parent, Call(parent._link.members, what, peers=others)) as operation:
        return _without_waiting(lambda: make(among(parent._link.now, ranks)), operation)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    """Cut a group into groups of consecutive ranks; return this rank's new group, and a list of all new groups.

    The ranks of the group that is cut call it. The list has ``GroupMember.NON_GROUP_MEMBER`` for groups of other ranks.

    Parameters
    ----------
    group_size : int, optional
        The number of ranks in each new group, which divides the number of ranks in ``group``. By default it is the
        number of ranks on a node, which has to be the same on every node.
    group : ProcessGroup, optional
        The group that is cut; all ranks by default.
    timeout, backend, pg_options, group_desc
        As for `new_group`; the backend is by default that of ``group``.

    Examples
    --------
    >>> mine, groups = dist.new_subgroups(group_size=1)
    >>> mine.size(), len(groups)
    (1, 2)
    """
    whole = member(group, "new_subgroups")
    if whole is None:
        return None, []
    if group_size is None:
        counts = set(Counter(whole._link.nodes).values())
        if len(counts) > 1:
            raise ValueError(f"nodes hold different numbers of ranks ({sorted(counts)}): give group_size")
        group_size = counts.pop()
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be a positive integer, got {group_size!r}")
    if group_size > whole.size():
        raise ValueError(f"The arg group_size ({group_size}) must not exceed the world size ({whole.size()})")
    if whole.size() % group_size:
        raise ValueError(f"The world size ({whole.size()}) must be divisible by group_size={group_size}")
    parts = [list(range(start, start + group_size)) for start in range(0, whole.size(), group_size)]
    return _split_all(whole, parts, "new_subgroups", maker(whole, timeout, backend, group_desc))


def _split_all(
    parent: ProcessGroup, parts: Sequence[Sequence[int]], what: str, make: Make
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    mine = split(parent, parts, what, make)
    return mine, [mine if parent.rank() in part else GroupMember.NON_GROUP_MEMBER for part in parts]


def _disjoint(given: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the ranks of each part in order; ValueError if two parts share one."""
    parts = [sorted(checked_ranks(part, size)) for part in given]
    seen: dict[int, list[int]] = {}
    for part in parts:
        for rank in part:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {seen[rank]} and {part}")
            seen[rank] = part
    return parts


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    """Make several disjoint groups at once; return this rank's group, or None, and a list of all new groups.

    All ranks of the default group call it.

    Parameters
    ----------
    ranks_per_subgroup_list : sequence of sequences of int
        The global ranks of each group, equal on all ranks. If a rank appears twice it is a ValueError, and no group is
        made.
    timeout, backend, pg_options, group_desc
        As for `new_group`.

    Examples
    --------
    >>> mine, groups = dist.new_subgroups_by_enumeration([[0], [1]])
    >>> mine.ranks == (dist.get_rank(),)
    True
    """
    parent = default_group()
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    parts = _disjoint(ranks_per_subgroup_list, parent.size())
    make = maker(parent, timeout, backend, group_desc)
    return _split_all(parent, parts, "new_subgroups_by_enumeration", make)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into disjoint groups; return this rank's new group, or None.

    Only the ranks of the group that is split call it.

    Parameters
    ----------
    parent_pg : ProcessGroup, optional
        The group that is split; all ranks by default.
    split_ranks : sequence of sequences of int
        For each new group its ranks *in* ``parent_pg``. ValueError if two share a rank.
    timeout, pg_options, group_desc, backend
        As for `new_group`; the backend is by default that of ``parent_pg``.

    Examples
    --------
    >>> mine = dist.split_group(split_ranks=[[0], [1]])
    >>> mine.ranks == (dist.get_rank(),)
    True
    """
    parent = member(parent_pg, "split_group")
    if parent is None:
        return None
    if not split_ranks:
        raise ValueError("split_ranks cannot be empty: give the ranks of each part")
    parts = _disjoint(split_ranks, parent.size())
    return split(parent, parts, "split_group", maker(parent, timeout, backend, group_desc))

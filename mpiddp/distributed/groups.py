"""Process groups: who belongs to them, what they are called, and how they are made and found."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mpiddp.errors import MismatchError
from mpiddp.mpi import work
from mpiddp.mpi.library import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Operation

from .backends import check_backend

if TYPE_CHECKING:
    from mpiddp.mpi.runtime import World


class ProcessGroup:
    """A group of ranks that communicate with each other (``torch.distributed.ProcessGroup``).

    Made by `init_process_group` and `new_group`, never directly.
    """

    def __init__(self, link: Link, name: str, description: str) -> None:
        self.link = link
        self.group_name = name
        self.group_desc = description
        self._group_rank_of = {rank: index for index, rank in enumerate(link.ranks)}

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.link.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.link.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in the order of their group ranks."""
        return self.link.ranks

    @property
    def comm(self) -> MPI.Intracomm:
        """The group's mpi4py communicator, for what MPI can do and mpiddp cannot.

        Calls on it must stand at the same place among the group's collectives on every rank.
        """
        return self.link.now

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global rank.

        Raises
        ------
        ValueError
            If it does not belong to the group.
        """
        try:
            return self._group_rank_of[global_rank]
        except (KeyError, TypeError):
            raise ValueError(
                f"Global rank {global_rank!r} is not part of {self.link}; `src` and `dst` are global ranks, `group_src`"
                " and `group_dst` are ranks of the group"
            ) from None

    def checked(self, group_rank: int) -> int:
        """Return ``group_rank`` if the group has it.

        Raises
        ------
        ValueError
            If it is not an integer from 0 to size - 1.
        """
        if isinstance(group_rank, bool) or not isinstance(group_rank, int) or not 0 <= group_rank < self.link.size:
            raise ValueError(f"Group rank {group_rank!r} is not part of {self.link}, which has {self.link.size} ranks")
        return group_rank

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name}: {self.link}>"


class GroupMember:
    """What `new_group` gives to a rank that is not in the group."""

    NON_GROUP_MEMBER: Literal[-100] = -100


GroupLike: TypeAlias = ProcessGroup | int | None
"""A group as an argument: None is the group of all ranks, ``GroupMember.NON_GROUP_MEMBER`` warns and does nothing."""

NOT_INITIALIZED = "Default process group has not been initialized, please make sure to call init_process_group."

_default: ProcessGroup | None = None
_groups: dict[ProcessGroup, None] = {}
_made = 0
_missing = NOT_INITIALIZED
"""What to say where there is no default group."""


class _WorldType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch's name
        """The group of all ranks, or None before `init_process_group`."""
        return _default


class group(metaclass=_WorldType):  # noqa: N801 - torch's name
    """Holds ``group.WORLD``, the group of all ranks."""


def register(made: ProcessGroup, *, default: bool = False) -> ProcessGroup:
    """Keep a new group until it is destroyed."""
    global _default, _made
    _groups[made] = None
    _made += 1
    if default:
        _default = made
    return made


def default_group() -> ProcessGroup:
    """Return the group of all ranks.

    Raises
    ------
    ValueError
        Before `init_process_group`, after `destroy_process_group`, and in a forked child.
    """
    if _default is None:
        raise ValueError(_missing)
    return _default


def has_default() -> bool:
    """Tell whether there is a group of all ranks."""
    return _default is not None


def disown(reason: str) -> None:
    """Forget all groups without freeing them, in a process that must not touch MPI; say ``reason`` when asked."""
    global _default, _missing
    _default, _missing = None, reason
    _groups.clear()


def member(given: GroupLike, operation: str) -> ProcessGroup | None:
    """Return the group to communicate in, or None, with torch's warning, for a rank that is not in it.

    Raises
    ------
    ValueError
        If there is no default group, or the group has been destroyed.
    TypeError
        If ``given`` is no group.
    """
    if given is None:
        if _default is None:
            raise ValueError(_missing)
        return _default
    if isinstance(given, ProcessGroup):
        if given.link.closed:
            raise ValueError(f"{operation}: the process group has been destroyed; make a new one with new_group")
        return given
    if given == GroupMember.NON_GROUP_MEMBER:
        warnings.warn(
            f"Running {operation} on global rank {default_group().rank()} which does not belong to the given group.",
            stacklevel=3,
        )
        return None
    raise TypeError(f"{operation} needs a group made by new_group, or None for all ranks, got {given!r}")


def resolve(given: GroupLike) -> ProcessGroup | None:
    """Return the group that is asked about, or None for a rank that is not in it."""
    return None if given == GroupMember.NON_GROUP_MEMBER else member(given, "this")


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank in ``group``, or -1 if it is not a member (``torch.distributed.get_rank``)."""
    found = resolve(group)
    return -1 if found is None else found.link.rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in ``group``, or -1 if this process is not a member."""
    found = resolve(group)
    return -1 if found is None else found.link.size


def _known(given: GroupLike) -> ProcessGroup:
    found = resolve(given)
    if found is None:
        raise ValueError("Invalid process group specified: this rank is not a member of it")
    return found


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in ``group`` of a global rank; ValueError if it is not a member (also for ``group.WORLD``)."""
    return _known(group).group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank of ``group``; ValueError if the group has no such rank."""
    found = _known(group)
    return found.ranks[found.checked(group_rank)]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of the members of ``group``, in the order of their group ranks."""
    return list(_known(group).ranks)


def get_pg_count() -> int:
    """Return how many groups this process is in."""
    return len(_groups)


def _checked_ranks(ranks: object, world_size: int) -> list[int]:
    """Return a list of distinct ranks of the world, or say what is wrong with it."""
    if not isinstance(ranks, (list, tuple, range)) or not ranks:
        raise TypeError(f"a group needs a non-empty list of ranks, got {ranks!r}")
    found = list(ranks)
    for rank in found:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"ranks must be integers, got {rank!r}")
        if not 0 <= rank < world_size:
            raise ValueError(
                "The new group's rank should be within the world_size set by init_process_group:"
                f" got {rank}, the world has ranks 0 to {world_size - 1}"
            )
    if len(set(found)) != len(found):
        raise ValueError(f"The new group's ranks must be distinct, got {found}")
    return found


def _agree(parent: Link, what: str, value: object) -> None:
    """Raise on every rank where the ranks of ``parent`` gave different values."""
    # Fixed-size fingerprints first: a list of ten thousand ranks from each of ten thousand ranks would not fit.
    text = repr(value)
    fingerprints = parent.now.allgather(zlib.crc32(text.encode()))
    if len(set(fingerprints)) > 1:
        odd = next(rank for rank, found in enumerate(fingerprints) if found != fingerprints[0])
        first, other = parent.now.bcast(text, 0), parent.now.bcast(text, odd)
        raise MismatchError(
            f"{what} was called with {first} on rank {parent.ranks[0]} and with {other} on rank {parent.ranks[odd]};"
            " all ranks must make the same groups in the same order, members or not"
        )


def _settle() -> None:
    """Let what is on its way come to its end, before calls to MPI that wait in it."""
    if work.unfinished:
        link = default_group().link
        work.wait_for(work.finished, Operation("new_group", link))


def _make(world: World, comm: MPI.Comm, timeout: timedelta | float | None, description: str | None) -> ProcessGroup:
    timeout_s = work.seconds(timeout)
    parent = default_group().link
    link = Link(world, MPI.Intracomm(comm), parent.timeout_s if timeout_s is None else timeout_s)
    return register(ProcessGroup(link, str(_made), description or "undefined"))


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
    """Make a group of some of the ranks (``torch.distributed.new_group``), by a split of the world's communicator.

    Every rank of the world calls it, members or not, in the same order.

    Parameters
    ----------
    ranks : sequence of int, optional
        Global ranks of the members; all ranks by default.
    timeout : timedelta or float, optional
        How long an operation of the group may take; the world's by default; a number is seconds.
    backend : str, optional
        Checked as in `init_process_group`.
    use_local_synchronization : bool, default False
        Only the members call it; ranks may make any groups in any order in which nobody waits in a circle.
    group_desc : str, optional
        A description.
    sort_ranks : bool, default True
        Number the members in the order of their global ranks; False keeps the order given.
    pg_options, device_id
        Accepted for compatibility.

    Returns
    -------
    ProcessGroup, or ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not a member (None with
    ``use_local_synchronization``).

    Raises
    ------
    TypeError, ValueError
        If the ranks are not distinct ranks of the world.
    MismatchError
        On every rank, if ranks gave different lists.
    """
    parent = default_group()
    check_backend(backend)
    work.seconds(timeout)
    world = parent.link.world
    chosen = list(parent.ranks) if ranks is None else _checked_ranks(ranks, parent.size())
    if sort_ranks:
        chosen.sort()
    me = parent.rank()
    _settle()
    comm: MPI.Comm
    if use_local_synchronization:
        if me not in chosen:
            return None
        # The tag, equal on all members and on nobody's mind elsewhere, keeps groups apart that are made at once.
        tag = zlib.crc32(repr(chosen).encode()) % 30_000
        mpi_group = parent.link.now.Get_group()
        comm = parent.link.now.Create_group(mpi_group.Incl(chosen), tag)
        return _make(world, comm, timeout, group_desc)
    _agree(parent.link, "new_group", chosen)
    color = 0 if me in chosen else MPI.UNDEFINED
    comm = parent.link.now.Split(color, chosen.index(me) if me in chosen else 0)
    if comm == MPI.COMM_NULL:
        return GroupMember.NON_GROUP_MEMBER
    return _make(world, comm, timeout, group_desc)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    """Cut a group into groups of equal size of consecutive ranks (``torch.distributed.new_subgroups``).

    Parameters
    ----------
    group_size : int, optional
        Ranks in each group; by default the number of ranks on a node, which must be the same on all nodes.
    group : ProcessGroup, optional
        What is cut; all ranks by default. Every rank of the world calls.

    Returns
    -------
    tuple of this rank's group and the list of all, in which groups of others are ``NON_GROUP_MEMBER``.

    Raises
    ------
    ValueError
        If the size does not divide the number of ranks.
    """
    whole = member(group, "new_subgroups") or default_group()
    if group_size is None:
        counts = {whole.link.nodes.count(node) for node in whole.link.nodes}
        if len(counts) > 1:
            raise ValueError(f"nodes hold different numbers of ranks ({sorted(counts)}): give group_size")
        group_size = counts.pop()
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be a positive integer, got {group_size!r}")
    if group_size > whole.size():
        raise ValueError(f"The arg group_size ({group_size}) must not exceed the world size ({whole.size()})")
    if whole.size() % group_size:
        raise ValueError(f"The world size ({whole.size()}) must be divisible by group_size={group_size}")
    ranks = list(whole.ranks)
    blocks = [ranks[start : start + group_size] for start in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(blocks, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    """Make several groups that share no rank (``torch.distributed.new_subgroups_by_enumeration``).

    Returns
    -------
    tuple of this rank's group, None if it is in none, and the list of all.

    Raises
    ------
    ValueError
        If a rank appears twice; before any group is made, unlike torch.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    seen: dict[int, list[int]] = {}
    for given in ranks_per_subgroup_list:
        block = _checked_ranks(given, default_group().size())
        for rank in block:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {seen[rank]} and {block}")
            seen[rank] = block
    made = [
        new_group(block, timeout=timeout, backend=backend, pg_options=pg_options, group_desc=group_desc)
        for block in ranks_per_subgroup_list
    ]
    mine = [found for found in made if isinstance(found, ProcessGroup)]
    return (mine[0] if mine else None), made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into groups that share no rank (``torch.distributed.split_group``), by one communicator split.

    Parameters
    ----------
    parent_pg : ProcessGroup, optional
        What is split; all its ranks call, and nobody else.
    split_ranks : sequence of sequences of int
        Ranks *of the parent group* that form each part.

    Returns
    -------
    ProcessGroup, or None on a rank that is in no part.

    Raises
    ------
    ValueError
        If a rank is in two parts, or there are none.
    MismatchError
        On every rank, if ranks gave different parts.
    """
    parent = member(parent_pg, "split_group")
    if parent is None:
        return None
    if not split_ranks:
        raise ValueError("split_ranks cannot be empty: give the ranks of each part")
    parts = [_checked_ranks(part, parent.size()) for part in split_ranks]
    flat = [rank for part in parts for rank in part]
    if len(set(flat)) != len(flat):
        raise ValueError(f"the split groups must share no rank, got {parts}")
    _settle()
    _agree(parent.link, "split_group", parts)
    me = parent.rank()
    mine = next((index for index, part in enumerate(parts) if me in part), None)
    color = MPI.UNDEFINED if mine is None else mine
    comm = parent.link.now.Split(color, 0 if mine is None else sorted(parts[mine]).index(me))
    return None if comm == MPI.COMM_NULL else _make(parent.link.world, comm, timeout, group_desc)


def destroy(given: GroupLike = None) -> None:
    """Free a group, or with None or ``group.WORLD`` all of them; see `destroy_process_group`."""
    global _default, _made, _missing
    if given is not None and not isinstance(given, ProcessGroup):
        if given == GroupMember.NON_GROUP_MEMBER:
            return
        raise TypeError(f"destroy_process_group needs a group made by new_group, or None for all, got {given!r}")
    if given is not None and given not in _groups:
        raise ValueError("Invalid process group specified: it has been destroyed already")
    if given is not None and given is not _default:
        given.link.close()
        del _groups[given]
        return
    if _default is None:
        raise AssertionError("Process group cannot be None")
    for each in reversed(list(_groups)):
        each.link.close()
    _groups.clear()
    _default, _made, _missing = None, 0, NOT_INITIALIZED

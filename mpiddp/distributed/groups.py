"""Process groups: their members, their names, and the default group of all ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, TypeAlias

from mpiddp.algorithms.plan import Plans
from mpiddp.faults.monitor import GroupMonitor
from mpiddp.mpi import recorder
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.p2p import Mailbox


class ProcessGroup:
    """A group of ranks, as `init_process_group` and `new_group` make it. Calls on a destroyed group raise ValueError.

    Attributes
    ----------
    ranks : tuple of int
        The members' ranks in the default group, in the order of the group ranks.
    comm : mpi4py intracommunicator
        A communicator for the program's own MPI calls, which every rank makes at the same point among the group's
        operations. It is the communicator that was given to `init_process_group`, if any.
    group_name, group_desc : str
        The number of the group in this process, and the text given as ``group_desc=``.

    Examples
    --------
    >>> pair = dist.new_group([1, 0], sort_ranks=False)
    >>> pair.ranks, pair.rank() == 1 - dist.get_rank(), pair.size()
    ((1, 0), True, 2)
    >>> pair.comm.allreduce(1)
    2
    """

    def __init__(self, link: Link, description: str, ranks: tuple[int, ...], comm: MPI.Intracomm) -> None:
        self._link = link
        self._monitor = link[GroupMonitor]
        self._plans = link.resource(Plans)
        self._mailbox = link.resource(Mailbox)
        self.group_name = str(_made)
        self.group_desc = description
        self.ranks = ranks
        self.comm = comm
        self._monitored_barriers = self._passed_barrier = 0
        self._group_rank_of = dict(zip(ranks, link.world.ranks, strict=False))

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._link.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._link.size

    def _group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global rank; ValueError if it is not a member."""
        try:
            return self._group_rank_of[global_rank if type(global_rank) is int else as_rank(global_rank)]
        except (KeyError, TypeError):
            raise ValueError(
                f"Global rank {global_rank!r} is not part of {self._link}; `src` and `dst` are global ranks,"
                " `group_src` and `group_dst` are ranks of the group"
            ) from None

    def _checked(self, group_rank: int) -> int:
        """Return ``group_rank``; ValueError if it is not an integer from 0 to size - 1."""
        try:
            rank = as_rank(group_rank)
        except TypeError:
            rank = -1
        if not 0 <= rank < self._link.size:
            raise ValueError(
                f"Group rank {group_rank!r} is not part of {self._link}, which has {self._link.size} ranks"
            )
        return rank

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name}: {self._link}>"


def as_rank(value: object) -> int:
    """Return an integer, also NumPy's, as an int; TypeError for anything else, bool included."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise TypeError(f"a rank must be an integer, got {value}")
    return operator.index(value)  # type: ignore[arg-type]


class GroupMember:
    """The class that has ``GroupMember.NON_GROUP_MEMBER``, which `new_group` returns on a rank that is no member."""

    NON_GROUP_MEMBER: Literal[-100] = -100


GroupLike: TypeAlias = ProcessGroup | int | None
"""None stands for all ranks. With ``GroupMember.NON_GROUP_MEMBER`` a call warns and does nothing."""

NOT_INITIALIZED = "Default process group has not been initialized, please make sure to call init_process_group."

_default: ProcessGroup | None = None
_groups: dict[ProcessGroup, None] = {}
_made = 0
_missing = NOT_INITIALIZED


class _WorldType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch's name
        return _default


class group(metaclass=_WorldType):  # noqa: N801 - torch's name
    """The class that has ``group.WORLD``, the group of all ranks, or None before `init_process_group`."""


def register(made: ProcessGroup, *, default: bool = False) -> ProcessGroup:
    global _default, _made
    _groups[made] = None
    made._link.members.name, made._link.members.description = made.group_name, made.group_desc
    _made += 1
    if default:
        _default = made
    return made


def default_group() -> ProcessGroup:
    """Return the group of all ranks; ValueError if there is none, as before init and in a forked child."""
    if _default is None:
        raise ValueError(_missing)
    return _default


def is_initialized() -> bool:
    """Return True between `init_process_group` and the end of the default group."""
    return _default is not None


def discard(given: ProcessGroup | None = None) -> None:
    """End a group on this rank alone, if the ranks cannot free it together. The default group, or None, ends all."""
    if given is not None and given is not _default:
        del _groups[given]
        given._link.discard()
        return
    for each in _groups:
        each._link.discard()
    disown(NOT_INITIALIZED)


def disown(reason: str) -> None:
    """Forget all groups. Later calls raise ``reason``: no group is there, or a forked child must not touch MPI."""
    global _default, _made, _missing
    for each in _groups:
        each._link.closed = True
        each._plans.forget()
    _default, _made, _missing = None, 0, reason
    _groups.clear()


def member(given: GroupLike, operation: str) -> ProcessGroup | None:
    """Return the group of a call; on a rank that is no member, warn as torch does and return None."""
    if given is None:
        if _default is None:
            raise ValueError(_missing)
        return _default
    if isinstance(given, ProcessGroup):
        if given._link.closed:
            gone = "the process group has been destroyed; make a new one with new_group"
            raise ValueError(f"{operation}: {gone if _missing is NOT_INITIALIZED else _missing}")
        return given
    if given == GroupMember.NON_GROUP_MEMBER:
        recorder.warn(
            f"Running {operation} on global rank {default_group().rank()} which does not belong to the given group."
        )
        return None
    raise TypeError(f"{operation} needs a group made by new_group, or None for all ranks, got {given!r}")


def resolve(given: GroupLike) -> ProcessGroup | None:
    return None if given == GroupMember.NON_GROUP_MEMBER else member(given, "this")


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank in a group; -1 on a rank that is no member.

    ValueError before `init_process_group`, and for a destroyed group.

    Examples
    --------
    >>> 0 <= dist.get_rank() < dist.get_world_size() == 2
    True
    """
    group = resolve(group)
    return -1 if group is None else group._link.rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in a group; -1 on a rank that is no member. Errors are those of `get_rank`.

    Examples
    --------
    >>> dist.get_world_size()
    2
    """
    group = resolve(group)
    return -1 if group is None else group._link.size


def known(given: GroupLike) -> ProcessGroup:
    """Return the group of a call; ValueError on a rank that is no member."""
    group = default_group() if given is None else resolve(given)
    if group is None:
        raise ValueError("Invalid process group specified: this rank is not a member of it")
    return group


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in ``group`` of ``global_rank``; ValueError if it is no member.

    Examples
    --------
    >>> dist.get_group_rank(dist.new_group([1, 0], sort_ranks=False), 1)
    0
    """
    return known(group)._group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank in ``group``; ValueError if ``group_rank`` is out of range.

    Examples
    --------
    >>> dist.get_global_rank(dist.new_group([1, 0], sort_ranks=False), 0)
    1
    """
    group = known(group)
    return group.ranks[group._checked(group_rank)]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group's members, in the order of their group ranks; None stands for all ranks.

    Examples
    --------
    >>> dist.get_process_group_ranks(None)
    [0, 1]
    """
    return list(known(group).ranks)


def get_pg_count() -> int:
    """Return the number of groups that this process is a member of."""
    return len(_groups)


def doomed(given: GroupLike = None) -> list[ProcessGroup]:
    """Return the groups that `destroy_process_group` of ``given`` ends; DistError if one has pending operations."""
    if given is not None and not isinstance(given, ProcessGroup):
        if given == GroupMember.NON_GROUP_MEMBER:
            return []
        raise TypeError(f"destroy_process_group needs a group made by new_group, or None for all, got {given!r}")
    if given is not None and given not in _groups:
        raise ValueError("Invalid process group specified: it has been destroyed already")
    if _default is None:
        raise AssertionError("Process group cannot be None")
    ending = list(reversed(_groups)) if given is None or given is _default else [given]
    for each in ending:
        each._link.expect_idle()
    return ending


def destroy(ending: Sequence[ProcessGroup]) -> None:
    for each in ending:
        each._link.close()
        del _groups[each]
    if not _groups:
        disown(NOT_INITIALIZED)

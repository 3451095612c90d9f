"""Point to point: blocking and non-blocking, by tag, from any source, in batches.

Messages between two ranks with the same tag keep their order (MPI 4.1, section 3.5). One that does not fit is an
`ArrayError` on the receiver, which removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.mpi import requests
from mpiddp.mpi.message import as_array
from mpiddp.mpi.operation import Call
from mpiddp.mpi.p2p import ANY_SOURCE
from mpiddp.mpi.work import Work
from mpiddp.typing import Array, ArrayLike

from . import debug
from .dispatch import begin, calling, root_rank
from .groups import GroupLike, ProcessGroup, as_rank, known, member

_MAX_CALLS = 256


def _checked_tag(group: ProcessGroup, tag: int, name: str) -> int:
    largest = group.mailbox.max_tag
    if type(tag) is int and 0 <= tag <= largest:
        return tag
    try:
        found = as_rank(tag)  # accepts the integers that are ranks
    except TypeError:
        found = -1
    if not 0 <= found <= largest:
        raise ValueError(f"{name} needs a tag from 0 to {largest}, got {tag!r}")
    return found


def _message(name: str, group: ProcessGroup, x: Array, peers: tuple[int, ...], tag: int) -> Call:
    key = name, peers, _checked_tag(group, tag, name), x.dtype, x.shape
    calls = group.mailbox.calls
    call = calls.get(key)
    if call is None:
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        calls[key] = call = Call(group.link.members, name, x.dtype, x.shape, x.shape, peers, key[2])
    return call


def send(
    tensor: ArrayLike,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor``, of any shape and dtype, and return when its memory may be used again.

    ``tag``, from 0 to MPI's limit, is the receiver's, too.
    """
    found = member(group, "send")
    if found is None:
        return
    to = root_rank(found, dst, group_dst)
    if to == found.link.rank:
        raise ValueError("Invalid destination rank: destination rank should not be the same as the current rank.")
    x = as_array(tensor, "send", writable=False)
    with calling(found, _message("send", found, x, (found.link.ranks[to],), tag)) as operation:
        if requests.pending or found.monitor.survivable:
            found.mailbox.isend(x, to, tag, operation).wait()
        else:
            found.mailbox.send(x, to, tag)


def isend(
    tensor: ArrayLike,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begin to send ``tensor``, unchanged until the `Work`'s end, to any rank; ``tag`` as in `send`."""
    found = member(group, "isend")
    if found is None:
        return None
    to = root_rank(found, dst, group_dst)
    x = as_array(tensor, "isend", writable=False)
    operation, _ = begin(found, _message("isend", found, x, (found.link.ranks[to],), tag))
    submitted = found.mailbox.isend(x, to, tag, operation)
    if debug.detail:
        submitted._run_check(debug.Watched(operation, (x,)).check)
    return submitted


def _sources(group: ProcessGroup, src: int | None, group_src: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the source's group rank, or ANY_SOURCE, and its possible world ranks."""
    if src is None and group_src is None:
        return ANY_SOURCE, group.link.others
    source = root_rank(group, src, group_src)
    return source, (group.link.ranks[source],)


def recv(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into ``tensor``, with ``tag`` as in `send`; return the sender's global rank.

    A message of its dtype that is shorter fills the beginning.
    """
    found = member(group, "recv")
    if found is None:
        return -1
    source, peers = _sources(found, src, group_src)
    x = as_array(tensor, "recv")
    with calling(found, _message("recv", found, x, peers, tag)) as operation:
        if requests.pending or found.monitor.survivable:
            receive = found.mailbox.irecv(x, source, tag, operation)
            receive.wait()
            return found.ranks[receive.sender]
        return found.ranks[found.mailbox.recv(x, source, tag, operation)]


def irecv(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begin to receive into ``tensor``, as `recv`; receives match in the order of these calls.

    ``wait()`` raises `ArrayError` if the message does not fit; `source_rank` and `count` tell who sent how much.
    ``tag`` as in `send`.
    """
    found = member(group, "irecv")
    if found is None:
        return None
    source, peers = _sources(found, src, group_src)
    x = as_array(tensor, "irecv")
    operation, _ = begin(found, _message("irecv", found, x, peers, tag))
    return found.mailbox.irecv(x, source, tag, operation, found.ranks)


class P2POp:
    """One operation of a batch.

    Parameters
    ----------
    op : function
        `isend` or `irecv`, with their ``tensor`` and ``tag``.
    peer, group_peer : int, optional
        The other side, as a global rank or a rank of the group; one of the two.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: ArrayLike,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"Invalid ``op``. Expected ``op`` to be isend or irecv of this package, got {op!r}")
        self.op = op
        self.tensor = tensor
        self.group = known(group)
        self.group_peer = root_rank(self.group, peer, group_peer)
        self.peer = self.group.ranks[self.group_peer]
        self.tag = tag


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin the sends and receives of ``p2p_op_list``, in any order; if an argument is wrong, none has begun."""
    if not isinstance(p2p_op_list, (list, tuple)) or not all(isinstance(each, P2POp) for each in p2p_op_list):
        raise ValueError("Invalid ``p2p_op_list``. Each op is expected to be of type P2POp.")
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv needs at least one P2POp")
    if any(each.group is not p2p_op_list[0].group for each in p2p_op_list):
        raise ValueError("All ops need to use the same group.")
    for each in p2p_op_list:
        as_array(each.tensor, each.op.__name__, writable=each.op is irecv)
        _checked_tag(each.group, each.tag, each.op.__name__)
    ordered = sorted(range(len(p2p_op_list)), key=lambda index: p2p_op_list[index].op is not irecv)
    works: dict[int, Work] = {}
    for index in ordered:  # no message arrives unexpected
        each = p2p_op_list[index]
        side = "group_src" if each.op is irecv else "group_dst"
        works[index] = each.op(each.tensor, group=each.group, tag=each.tag, **{side: each.group_peer})
    return [works[index] for index in range(len(p2p_op_list))]

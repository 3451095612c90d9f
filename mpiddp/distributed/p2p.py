"""Messages between two ranks: blocking and asynchronous, by tag, from any source, in batches.

Messages between two ranks with the same tag keep their order (MPI 4.1, section 3.5). A message that does not fit raises
an `ArrayError` on the receiver and is removed, so that the next one is received correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from mpiddp.mpi import requests
from mpiddp.mpi.message import as_array
from mpiddp.mpi.operation import Call
from mpiddp.mpi.p2p import ANY_SOURCE, code_of
from mpiddp.mpi.work import Ended, Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import begin_message, calling, ended, root_rank
from .groups import GroupLike, ProcessGroup, as_rank, known, member

_MAX_CALLS = 256


def _checked_tag(group: ProcessGroup, tag: int, name: str) -> int:
    largest = group._mailbox.max_tag
    if type(tag) is int and 0 <= tag <= largest:
        return tag
    try:
        number = as_rank(tag)  # tags and ranks may have the same types
    except TypeError:
        number = -1
    if not 0 <= number <= largest:
        raise ValueError(f"{name} needs a tag from 0 to {largest}, got {tag!r}")
    return number


def _message(name: str, group: ProcessGroup, x: Array, peer: int, tag: int) -> tuple[Call, int]:
    """Return the call of a message to or from a rank of the group, or `ANY_SOURCE`, and its code."""
    if type(tag) is not int:
        tag = _checked_tag(group, tag, name)
    calls = group._mailbox.calls
    key = name, peer, tag, x.dtype, x.shape
    found = calls.get(key)
    if found is None:
        _checked_tag(group, tag, name)
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        link = group._link
        peers = link.others if peer == ANY_SOURCE else (link.ranks[peer],)
        calls[key] = found = Call(link.members, name, x.dtype, x.shape, peers, tag), code_of(x, tag)
    return found


def _at_once(group: ProcessGroup, x: Array) -> bool:
    """Return True if a blocking call may go straight to MPI."""
    return not (requests.pending or group._monitor.polls) and type(x) is np.ndarray


def send(
    tensor: ArrayLike,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send an array to another rank; return when its memory may be used again.

    Parameters
    ----------
    tensor : array
        Of any shape and dtype. It may be read-only.
    dst, group_dst : int
        The receiver, as a global rank or as a rank of the group: one of the two, and not this rank.
    tag : int, default 0
        From 0 to a limit of the MPI library, which the ValueError names. The receiver gives the same.
    group
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.full(2, float(dist.get_rank()))
    >>> if dist.get_rank() == 0:
    ...     dist.send(x, dst=1)
    ... else:
    ...     sender = dist.recv(x, src=0)
    >>> x.tolist()
    [0.0, 0.0]
    """
    group = member(group, "send")
    if group is None:
        return
    to = root_rank(group, dst, group_dst)
    if to == group._link.rank:
        raise ValueError("Invalid destination rank: destination rank should not be the same as the current rank.")
    x = as_array(tensor, "send", writable=False)
    call, code = _message("send", group, x, to, tag)
    request, at_once = None, _at_once(group, x)
    if at_once:
        request = group._mailbox.send(x, to, code)
        if request is None:
            ended(group, call)
            return
    with calling(group, call) as operation:
        if request is None:
            group._mailbox.isend(x, to, code, operation).wait()
        else:
            request.Wait()


def isend(
    tensor: ArrayLike,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begin to send an array, also to this rank. Leave ``tensor`` unchanged until the `Work` has ended.

    ``dst``, ``group``, ``tag`` and ``group_dst`` are as in `send`.

    Examples
    --------
    >>> x, peer = np.empty(1), 1 - dist.get_rank()
    >>> work = dist.isend(np.array([float(dist.get_rank())]), dst=peer)
    >>> dist.recv(x, src=peer) == peer == x.item()
    True
    >>> work.wait()
    True
    """
    group = member(group, "isend")
    if group is None:
        return None
    to = root_rank(group, dst, group_dst)
    x = as_array(tensor, "isend", writable=False)
    return _isend(group, x, to, *_message("isend", group, x, to, tag))


def _isend(group: ProcessGroup, x: Array, to: int, call: Call, code: int) -> Work:
    mailbox, request = group._mailbox, None
    if not group._monitor.polls and mailbox.takes_no_turn(x, to):
        request = mailbox.send(x, to, code)
        if request is None:
            ended(group, call, 4)
            return Ended((x,))
    return mailbox.isend(x, to, code, begin_message(group, call, 4), request)


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    return ANY_SOURCE if src is group_src is None else root_rank(group, src, group_src)


def recv(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive an array from a rank, or from any; return the sender's global rank.

    Parameters
    ----------
    tensor : array
        Of the message's dtype, and at least of its size. A shorter message fills the beginning.
    src, group_src : int, optional
        The sender, as a global rank or as a rank of the group. Any rank by default.
    tag : int, default 0
        The sender's.
    group
        See `mpiddp.distributed`, also for the errors.

    Examples
    --------
    >>> x = np.empty(1)
    >>> if dist.get_rank() == 1:
    ...     dist.send(np.array([3.0]), dst=0)
    ... else:
    ...     assert dist.recv(x) == 1 and x.item() == 3.0
    """
    group = member(group, "recv")
    if group is None:
        return -1
    source = _source(group, src, group_src)
    x = as_array(tensor, "recv")
    call, code = _message("recv", group, x, source, tag)
    mailbox = group._mailbox
    found, at_once = None, _at_once(group, x)
    if at_once:
        found = mailbox.recv(x, source, code, requests.look_for)
        if found is not None and found[1] is None:
            ended(group, call)
            return group.ranks[found[0]]
    with calling(group, call) as operation:
        if at_once and found is None:
            found = mailbox.recv(x, source, code, requests.yielding_probe)
        if found is None:
            receive = mailbox.irecv(x, source, code, operation)
            receive.wait()
            return group.ranks[receive.sender]
        sender, request = found
        if request is not None:
            request.Wait()
        return group.ranks[sender]


def irecv(
    tensor: ArrayLike,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begin to receive an array. Messages go to receives in the order of these calls.

    ``tensor``, ``src``, ``group``, ``tag`` and ``group_src`` are as in `recv`. ``wait()`` of the `Work` raises
    `ArrayError` if the message does not fit; its ``source_rank()`` tells who has sent it, ``count()`` how many elements
    have come.

    Examples
    --------
    >>> x, peer = np.empty(3), 1 - dist.get_rank()
    >>> work = dist.irecv(x, src=peer)
    >>> dist.send(np.ones(2), dst=peer)
    >>> work.wait(), work.source_rank() == peer, work.count()
    (True, True, 2)
    """
    group = member(group, "irecv")
    if group is None:
        return None
    source = _source(group, src, group_src)
    x = as_array(tensor, "irecv")
    call, code = _message("irecv", group, x, source, tag)
    return group._mailbox.irecv(x, source, code, begin_message(group, call), group.ranks)


class P2POp:
    """One operation of `batch_isend_irecv`.

    Parameters
    ----------
    op : function
        `isend` or `irecv`.
    tensor, group, tag
        The operation's.
    peer, group_peer : int, optional
        The other side, as a global rank or as a rank of the group: one of the two.
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
    """Begin several sends and receives at once; return a `Work` for each.

    The ranks may list them in different orders. ValueError for an empty list, operations of several groups, or anything
    but `P2POp` in ``p2p_op_list``; an error begins none of them.

    Examples
    --------
    >>> x, y, peer = np.array([float(dist.get_rank())]), np.empty(1), 1 - dist.get_rank()
    >>> works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])
    >>> [work.wait() for work in works], y.item() == peer
    ([True, True], True)
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not all(isinstance(each, P2POp) for each in p2p_op_list):
        raise ValueError("Invalid ``p2p_op_list``. Each op is expected to be of type P2POp.")
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv needs at least one P2POp")
    if any(each.group is not p2p_op_list[0].group for each in p2p_op_list):
        raise ValueError("All ops need to use the same group.")
    group = member(p2p_op_list[0].group, "batch_isend_irecv")
    assert group is not None, "P2POp refuses it"
    checked = []
    for index, each in enumerate(p2p_op_list):
        sends, peer = each.op is isend, each.group_peer
        name = "isend" if sends else "irecv"
        x = as_array(each.tensor, name, writable=not sends)
        checked.append((sends, index, x, peer, *_message(name, group, x, peer, each.tag)))
    works: list[Any] = [None] * len(checked)
    checked.sort(key=itemgetter(0))  # receives first, so that messages find their memory
    for sends, index, x, peer, call, code in checked:
        if sends:
            works[index] = _isend(group, x, peer, call, code)
        else:
            works[index] = group._mailbox.irecv(x, peer, code, begin_message(group, call), group.ranks)
    return works

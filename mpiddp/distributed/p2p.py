"""Messages between two ranks: blocking and asynchronous, by tag, from any source, in batches.

Messages between two ranks with the same tag keep their order (MPI 4.1, section 3.5). A message that does not fit raises
an `ArrayError` on the receiver and is removed, so that the next one is received correctly.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from numpy import ndarray

from mpiddp.mpi import requests
from mpiddp.mpi.fifo import ANY_SOURCE
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.message import as_array
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.p2p import Mailbox, Route
from mpiddp.mpi.requests import READY, awaiting
from mpiddp.mpi.work import Ended, Work
from mpiddp.typing import Array, ArrayLike

from .dispatch import begin_message, root_rank
from .groups import GroupLike, ProcessGroup, as_rank, default_group, known, member


def _message(
    name: str, tensor: ArrayLike, rank: int | None, group: GroupLike, tag: int, group_rank: int | None
) -> tuple[Array, Route] | None:
    """Return the checked array and the route of a message; None on a rank that is no member."""
    group = member(group, name)
    if group is None:
        return None
    if type(rank) is type(tag) is int and group_rank is None and type(tensor) is ndarray and tensor.flags.carray:
        route = group._mailbox.route((name, rank, tag, tensor.dtype, tensor.shape))
        if route is not None:
            return tensor, route
    return _checked(name, tensor, rank, group, tag, group_rank)


def _checked(
    name: str, tensor: ArrayLike, rank: int | None, group: ProcessGroup, tag: int, group_rank: int | None
) -> tuple[Array, Route]:
    mailbox, receives = group._mailbox, name.endswith("recv")
    peer = ANY_SOURCE if receives and rank is group_rank is None else root_rank(group, rank, group_rank)
    if name == "send" and peer == group._link.rank:
        raise ValueError("Invalid destination rank: destination rank should not be the same as the current rank.")
    x = as_array(tensor, name, writable=receives)
    try:
        number = as_rank(tag)  # tags and ranks may have the same types
    except TypeError:
        number = -1
    if not 0 <= number <= mailbox.max_tag:
        raise ValueError(f"{name} needs a tag from 0 to {mailbox.max_tag}, got {tag!r}")
    key = name, None if peer == ANY_SOURCE else group.ranks[peer], number, x.dtype, x.shape
    route = mailbox.route(key) if type(x) is ndarray else None
    return x, route or mailbox.add_route(key, peer, x, group.ranks)


def _at_once(mailbox: Mailbox, x: Array) -> bool:
    """Return True if a blocking call may wait in MPI."""
    return not (requests.pending or mailbox.polls) and type(x) is ndarray


def _wait(wait: Callable[[], object], entry: list[Any]) -> None:
    """Call ``wait``, which blocks in MPI, and show the wait to the watchdog."""
    operation = Operation(*entry)  # the report of a Ctrl-C looks for a variable of this name
    with awaiting(operation):
        wait()


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
        From 0 to a limit of the MPI library, which the ValueError names. The receiver gives the same tag.
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
    message = _message("send", tensor, dst, group, tag, group_dst)
    if message is None:
        return
    x, route = message
    request = route.mailbox.send(x, route) if _at_once(route.mailbox, x) else None
    if request is None:
        _isend(x, route).wait()
        return
    entry = begin_message(route)
    if not request.Test():
        _wait(request.Wait, entry)
    entry[-1] = monotonic()


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
    message = _message("isend", tensor, dst, group, tag, group_dst)
    if message is None:
        return None
    x, route = message
    return _isend(x, route)


def _isend(x: Array, route: Route) -> Work:
    mailbox = route.mailbox
    try:
        request = mailbox.send(x, route)
        entry = begin_message(route, 4)
        # If the mailbox polls, Test is left to wait() of the message, which then raises the errors of Test.
        if request is not READY and (request is None or mailbox.polls or not request.Test()):
            return mailbox.isend(x, route, entry, request)
    except MPI.Exception as error:  # another rank may have noticed a failure and revoked the communicators
        mailbox.link.monitor.translate(error)
        raise
    entry[-1] = entry[-2]
    return Ended((x,))


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
        The tag that the sender gives.
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
    message = _message("recv", tensor, src, group, tag, group_src)
    if message is None:
        return -1
    x, route = message
    mailbox, entry = route.mailbox, begin_message(route)
    at_once = _at_once(mailbox, x)
    found = mailbox.recv(x, route) if at_once else None
    if found is not None:
        sender, request = found
        if not request.Test():
            _wait(request.Wait, entry)
        entry[-1] = monotonic()
        return route.ranks[sender]
    try:
        receive = mailbox.irecv(x, route, entry)
        if at_once:
            _wait(receive.block, entry)
        receive.wait()
    except (KeyboardInterrupt, SystemExit):
        mailbox.give_up(entry)
        raise
    return route.ranks[receive.sender]


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
    message = _message("irecv", tensor, src, group, tag, group_src)
    if message is None:
        return None
    x, route = message
    return route.mailbox.irecv(x, route, begin_message(route))


class P2POp:
    """One operation of `batch_isend_irecv`.

    Parameters
    ----------
    op : function
        `isend` or `irecv`.
    tensor, group, tag
        The arguments of ``op``.
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
        if op is not isend and op is not irecv:
            raise ValueError(f"Invalid ``op``. Expected ``op`` to be isend or irecv of this package, got {op!r}")
        self.op, self.tensor, self.tag = op, tensor, tag
        self.group = group = default_group() if group is None else known(group)
        self.group_peer = group_peer = root_rank(group, peer, group_peer)
        self.peer = group.ranks[group_peer]


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin several sends and receives at once; return a `Work` for each.

    The ranks may list them in different orders. ValueError for an empty list, operations of several groups, or anything
    but `P2POp` in ``p2p_op_list``. After such an error none of them has begun.

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
    messages: list[Any] = []
    works: list[Work] = []
    for each in p2p_op_list:
        if each.group is not p2p_op_list[0].group:
            raise ValueError("All ops need to use the same group.")
        name = "isend" if each.op is isend else "irecv"
        messages.append(_message(name, each.tensor, each.peer, each.group, each.tag, None))
    for x, route in messages:
        if route.call.operation == "isend":
            works.append(_isend(x, route))
        else:
            works.append(route.mailbox.irecv(x, route, begin_message(route)))
    return works

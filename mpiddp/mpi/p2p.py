"""Point to point: a message's dtype and length are checked before MPI gets the receiver's memory.

Open MPI hangs or crashes in a receive that is too short. Therefore a matched probe takes the messages in order. Here
they are matched with the posted receives, checked, and only then received. The dtype travels in the tag.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from mpiddp.device import stream
from mpiddp.errors import ArrayError, DistError, MismatchError
from mpiddp.typing import Array

from . import p2p_device, requests
from .lazy import MPI
from .link import Link, Resource, aborted
from .message import CODES, as_message, code_name, dtype_code, plain, size_of
from .operation import Call, Operation
from .requests import READY, Probe, Steps, active, interrupted, lock
from .work import Work

_EAGER_BYTES = 1 << 10
"""A message of at most this length arrives together with its envelope, so that its receive does not wait."""
_LOOKS = 10
"""Looks of a wait for one message before it yields the core; the other side is mostly about to send."""
_LAST_LOOKS = 100
"""Looks of a group's end; each takes a message or a few out of what MPI has in memory for this rank."""
_MAX_ROUTES = 256
ANY_SOURCE: int = -1


@dataclass(slots=True, eq=False)
class Route:
    """All of a message but its memory; equal messages share one."""

    mailbox: Mailbox
    call: Call
    peer: int
    """The other rank of the group, or `ANY_SOURCE`."""
    code: int
    """The number that MPI gets as the tag: of the program's tag, and of the dtype."""
    size_bytes: int
    plain: bool
    """True if MPI takes the array as it is."""
    ranks: Sequence[int]
    """The global ranks of the group's members."""


class _Arrival(NamedTuple):
    source: int
    code: int
    size_bytes: int
    message: MPI.Message


class Message(Work):
    """A send or a receive: one class, because Python finds attributes faster if the class is always the same."""

    _posted: stream.Mark | None = None
    """Behind the kernels queued at the call, for a receive into an array on a device."""

    def __init__(self, route: Route, x: Array, entry: list[Any]) -> None:
        # Setting an attribute again takes less time than adding it, therefore all are set here.
        self._route, self._outputs, self._entry = route, (x,), entry  # the entry of the flight recorder
        self._error, self._finished, self._awaited = None, False, None
        # A receive's sender, and the message's size, which may be less than the array's.
        self.sender, self.size_bytes = -1, 0
        requests.pending += 1

    @cached_property
    def _operation(self) -> Operation:  # type: ignore[override]
        return Operation(*self._entry)

    def _finish(self, error: BaseException | None) -> None:
        requests.pending -= 1
        self._error, self._finished, self._awaited = error, True, None
        if error is None:
            self._entry[-1] = monotonic()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._finished:
            self._route.mailbox.progress_of(self)
        if timeout is None and self._finished and self._error is None:
            return True
        return Work.wait(self, timeout)

    def source_rank(self) -> int:
        return self._route.ranks[self.sender] if self.sender >= 0 and self._finished else super().source_rank()

    def count(self) -> int:
        if not self._finished or self._operation.sends:
            return super().count()
        return self.size_bytes // max(self._outputs[0].itemsize, 1)

    def _fail(self, error: BaseException) -> None:
        self._route.mailbox.withdraw(self)
        super()._fail(error)

    def matches(self, arrival: _Arrival) -> bool:
        route = self._route
        return arrival.code // CODES == route.code // CODES and route.peer in (ANY_SOURCE, arrival.source)

    def accept(self, arrival: _Arrival) -> None:
        """Begin to receive a message. One that does not fit is received into other memory, and `wait` raises."""
        x, size_bytes, fault = self._outputs[0], arrival.size_bytes, ""
        self.sender, self.size_bytes = arrival.source, size_bytes
        if arrival.code != self._route.code:
            fault = f"{code_name(arrival.code % CODES)}, but its buffer is {x.dtype}: use one dtype on both sides"
        elif size_bytes > x.nbytes:
            fault = (
                f"{size_bytes // max(x.itemsize, 1)} elements ({size_bytes} bytes), but its buffer has {x.size}"
                f" ({x.nbytes} bytes): receive into an array at least as large"
            )
        if fault:
            self._steps = self._refuse(arrival, fault)
        elif self._posted is not None:
            self._steps = p2p_device.receive(x, self._posted, arrival.message, size_bytes)
        else:
            self._awaited = arrival.message.Irecv(as_message(x, size_bytes))
            return
        self._awaited = READY  # The steps begin when the receive is no longer posted.

    def _refuse(self, arrival: _Arrival, fault: str) -> Steps:
        yield arrival.message.Irecv(as_message(np.empty(arrival.size_bytes, np.uint8), arrival.size_bytes))
        sender = f"rank {arrival.source} of the group"
        raise ArrayError(f"a receive met a message from {sender} (tag {self._route.call.tag}) of {fault}")


class Mailbox(Resource):
    """The messages of a group on this rank: posted receives, messages without one, pending sends.

    Arrays come here through `message.as_array`: whatever is not NumPy's is CuPy's.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._comm = link.messages
        # Open MPI's other communicators may not have the attribute.
        upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.max_tag: int = (upper if isinstance(upper, int) else 32767) // CODES - 2
        self.polls = link.monitor.polls
        self._status = status = MPI.Status()
        probe = partial(self._comm.Improbe, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        self._probes: Iterator[MPI.Message | None] = iter(probe, object())
        """A message that has come, or None, without end. After a call of Improbe a Ctrl-C could lose the message."""
        self._arrived: list[_Arrival] = []
        self._posted: deque[Message] = deque()
        self._routes: dict[Any, Route] = {}
        self.route = self._routes.get
        self._moving: dict[Work, None] = {}
        """Messages that have begun to move: all pending ones but the posted receives."""
        self._departing: defaultdict[int, deque[object]] = defaultdict(deque)

    def add_route(self, key: tuple[Any, ...], peer: int, x: Array, ranks: Sequence[int]) -> Route:
        """Remember a checked message, for `route`. The key is its operation, global rank, tag, dtype and shape."""
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        link, (name, _, tag, *_) = self.link, key
        peers = link.others if peer == ANY_SOURCE else (link.ranks[peer],)
        call, code = Call(link.members, name, x.dtype, x.shape, peers, tag), tag * CODES + dtype_code(x.dtype)
        route = Route(self, call, peer, code, x.nbytes, plain(x), ranks)
        if type(x) is ndarray:
            self._routes[key] = route
        return route

    def pending(self) -> int:
        return len(self._moving) + len(self._posted)

    def unmatched(self) -> list[tuple[int, int, str, int]]:
        """Return sender (group rank), tag, dtype and bytes of messages without a receive. Any thread may ask."""
        arrived = [(each.source, each.code, each.size_bytes) for each in tuple(self._arrived)]
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):  # one more, which no receive has probed for
            arrived.append((status.Get_source(), status.Get_tag(), size_of(status)))
        return [(source, code // CODES, code_name(code % CODES), size) for source, code, size in arrived]

    def drop(self, error: DistError) -> None:
        """End all messages with ``error``. Ranks that disagree about collectives may still exchange messages."""
        if not isinstance(error, MismatchError):
            self._comm = aborted(error)
            self.fail_pending(error)

    def close(self) -> None:
        """Look for messages that nobody has received: the next group could get their context, and receive them."""
        with contextlib.suppress(MPI.Exception):  # a rank has failed
            looks = (self._comm.Iprobe() for _ in range(_LAST_LOOKS))
            self.link.may_hold_messages |= bool(self._arrived) or any(looks)

    def send(self, x: Array, route: Route) -> MPI.Request | None:
        """Begin to send; return None, and leave it to `isend`, if a device or an earlier message has to be awaited."""
        if type(x) is not ndarray or (self._departing and self._departing.get(route.peer)):
            return None
        what = (x, MPI.BYTE) if route.plain else as_message(x, route.size_bytes)
        return self._comm.Isend(what, route.peer, route.code)

    def isend(self, x: Array, route: Route, entry: list[Any], request: MPI.Request | None) -> Work:
        """Return the message of a request of `send`, or without one send it in its turn."""
        lock.acquire()
        try:
            send = Message(route, x, entry)
            if request is None:
                to = route.peer
                send._steps = p2p_device.send(x, self._departing[to], self._comm, to, route.code)
                send._resume(send._steps)
            else:
                send._awaited = request
            self._moving[send] = active[self] = None
        finally:
            lock.release()
        return send

    def recv(self, x: Array, route: Route, probe: Probe) -> tuple[int, MPI.Request | None] | None:
        """Receive into a host array. Only while nothing is pending in this process.

        Return the sender and what is left to wait for; or None, and leave it to `irecv`, if ``probe`` finds no message,
        or one that has to wait for another receive or does not fit.
        """
        if self._arrived:
            return None
        status, source = self._status, route.peer
        message = probe(self._comm, MPI.ANY_SOURCE if source == ANY_SOURCE else source, MPI.ANY_TAG, status)
        if message is None:
            return None
        size_bytes = size_of(status)
        if status.Get_tag() != route.code or size_bytes > route.size_bytes:
            self._arrived.append(self._arrival(message))
            return None
        sender = status.Get_source()
        what = (x, MPI.BYTE) if route.plain and size_bytes == route.size_bytes else as_message(x, size_bytes)
        if size_bytes <= _EAGER_BYTES:
            message.Recv(what)  # does not wait: all of it has arrived
            return sender, None
        request = message.Irecv(what)
        return sender, None if request.Test() else request

    def irecv(self, x: Array, route: Route, entry: list[Any]) -> Message:
        """Post a receive. Messages go to the receives in the order of these calls."""
        lock.acquire()
        try:
            self._comm.Improbe  # noqa: B018 - raises if the group is aborted
            receive = Message(route, x, entry)
            if type(x) is not ndarray:
                receive._posted = stream.ready(x)
            active[self] = None
            arrival = self._take(receive) if self._arrived else None
            if arrival is None:
                self._posted.append(receive)
            else:
                receive.accept(arrival)
                if not receive._advance():
                    self._moving[receive] = None
        finally:
            lock.release()
        return receive

    def withdraw(self, receive: Message) -> None:
        """Let a posted receive take no message, but let it end when the mailbox is polled."""
        if receive in self._posted:
            self._posted.remove(receive)
            self._moving[receive] = None

    def fail_pending(self, error: BaseException) -> None:
        with lock:
            messages = *self._posted, *self._moving
            self._posted.clear()
            self._moving.clear()
            for each in messages:
                each._fail(error)
                each._announce()

    def _arrival(self, message: MPI.Message) -> _Arrival:
        status = self._status
        return _Arrival(status.Get_source(), status.Get_tag(), size_of(status), message)

    def _take(self, receive: Message) -> _Arrival | None:
        for index, arrival in enumerate(self._arrived):
            if receive.matches(arrival):
                return self._arrived.pop(index)
        return None

    def _match(self, awaited: Message | None = None, looks: int = 1) -> None:
        """Receive what has come for the posted receives, at most until ``awaited`` has ended."""
        posted, status = self._posted, self._status
        while posted and looks:
            for message in self._probes:  # noqa: B007 - read below
                break
            if message is None:
                looks -= 1
                continue
            receive = posted[0]
            try:
                route, source, size_bytes = receive._route, status.Get_source(), status.Get_count(MPI.BYTE)
                if (
                    status.Get_tag() == route.code
                    and 0 <= size_bytes <= route.size_bytes
                    and (source == route.peer or route.peer == ANY_SOURCE)
                    and route.plain
                ):
                    # The usual case: the message is the first receive's, and fits.
                    (x,) = receive._outputs
                    what = (x, MPI.BYTE) if size_bytes == route.size_bytes else [x, size_bytes, MPI.BYTE]
                    receive.sender, receive.size_bytes = source, size_bytes
                    if size_bytes > _EAGER_BYTES:
                        receive._awaited = message.Irecv(what)
                        posted.popleft()
                    else:
                        message.Recv(what)  # does not wait: all of it has arrived
                        posted.popleft()
                        receive._finish(None)
                else:
                    arrival = self._arrival(message)
                    for receive in posted:
                        if receive.matches(arrival):
                            receive.accept(arrival)
                            posted.remove(receive)
                            break
                    else:
                        message = None
            except MPI.Exception:
                raise
            except BaseException:  # a Ctrl-C
                if message:  # It has not been received, and is the next one again.
                    self._probes = chain((message,), self._probes)
                else:  # The receive has taken it, and must not take another one.
                    receive._fail(interrupted())
                    self._moving[receive] = None
                raise
            if message is None:  # there is no receive for it yet
                self._arrived.append(arrival)
                continue
            if not receive._finished:
                self._moving[receive] = None
                self._end(receive)
            elif receive._callbacks:
                receive._announce()
            if receive is awaited:
                return

    def _end(self, message: Work, looks: int = 1) -> None:
        while not message._advance():
            looks -= 1
            if not looks:
                return
        self._moving.pop(message, None)  # perhaps another thread, or a callback, has ended it
        if message._callbacks:
            message._announce()

    def progress_of(self, message: Message) -> None:
        lock.acquire()
        try:
            if message._awaited is None:
                self._match(message, _LOOKS)
            if message._awaited is not None:
                self._end(message, _LOOKS)
        except MPI.Exception as error:  # a rank has failed
            self.fail_pending(error)
        finally:
            lock.release()

    def progress(self) -> None:
        try:
            self._match()
        except MPI.Exception as error:  # an error of wait(), not of the poll
            self.fail_pending(error)
        for message in tuple(self._moving):  # a copy, because callbacks may send and poll
            self._end(message)
        if not (self._moving or self._posted):
            active.pop(self, None)

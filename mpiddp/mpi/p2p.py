"""Point to point: a message's dtype and length are checked before MPI gets the receiver's memory.

Messages come through FIFOs of the node and by MPI (`fifo`). Open MPI hangs or crashes in a receive that is too short.
Therefore matched probes take MPI's messages in order. A message is then matched with the posted receives, checked, and
only then received. A message in a FIFO is treated in the same way, unless it fits the first posted receive, which then
takes it directly. The tag that MPI gets encodes the dtype, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import chain
from time import monotonic
from typing import Any

import numpy as np
from numpy import ndarray

from mpiddp.device import stream
from mpiddp.errors import ArrayError, DistError, MismatchError
from mpiddp.typing import Array

from . import p2p_device, requests
from .fifo import ANY_SOURCE, Arrival, Lane, Letter, Transport
from .lazy import MPI
from .link import Link, Resource
from .message import CODES, as_message, code_name, dtype_code, plain
from .operation import Call, Operation
from .requests import READY, Awaited, Steps, active, interrupted, lock, pause
from .work import Work

_LOOKS = 10
"""How often a wait for one message looks before it yields the core. It looks less often where ranks share cores."""
_MAX_ROUTES = 256


@dataclass(slots=True, eq=False)
class Route:
    """The properties of a message, without its memory. Equal messages share one route."""

    mailbox: Mailbox
    call: Call
    peer: int
    """The other rank of the group, or `ANY_SOURCE`."""
    code: int
    """The tag that MPI gets: one number for the program's tag and the dtype."""
    size_bytes: int
    plain: bool
    """True if MPI takes the array as it is (`message.plain`)."""
    ranks: Sequence[int]
    """The global ranks of the group's members."""
    lane: Lane | None
    """The path through FIFOs; None if messages of this route go by MPI."""


class Message(Work):
    """A send or a receive. Both are of one class, because Python finds attributes faster if all objects are of one."""

    _posted: stream.Mark | None = None
    """For a receive into an array on a device, the mark behind the kernels that were queued before the call."""

    def __init__(self, route: Route, x: Array, entry: list[Any]) -> None:
        # To set an attribute again takes less time than to add it, so the constructor sets those that change later.
        self._route, self._outputs, self._entry = route, (x,), entry  # the flight recorder's entry
        self._error, self._finished, self._awaited = None, False, None
        # In a receive these become the message's sender, and its size, which may be less than the array's.
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

    def block(self) -> None:
        """Wait without a time limit, but return early if a message comes that no posted receive takes."""
        mailbox, polls = self._route.mailbox, 0
        mailbox.progress_of(self)
        while not (self._finished or mailbox._arrived):
            polls += 1
            pause(polls)
            mailbox.progress_of(self)

    def source_rank(self) -> int:
        return self._route.ranks[self.sender] if self.sender >= 0 and self._finished else super().source_rank()

    def count(self) -> int:
        if not self._finished or self._route.call.sends:
            return super().count()
        return self.size_bytes // max(self._outputs[0].itemsize, 1)

    def _fail(self, error: BaseException) -> None:
        self._route.mailbox.withdraw(self)
        super()._fail(error)

    def matches(self, arrival: Arrival) -> bool:
        route = self._route
        return arrival[1] // CODES == route.code // CODES and route.peer in (ANY_SOURCE, arrival[0])

    def accept(self, arrival: Arrival) -> None:
        """Begin to receive a message. If it does not fit, it is received into other memory, and `wait` raises."""
        x, route, fault = self._outputs[0], self._route, ""
        self.sender, code, self.size_bytes, message = arrival
        size_bytes = self.size_bytes
        if code != route.code:
            fault = f"{code_name(code % CODES)}, but its buffer is {x.dtype}: use one dtype on both sides"
        elif size_bytes > route.size_bytes:
            fault = (
                f"{size_bytes // max(x.itemsize, 1)} elements ({size_bytes} bytes), but its buffer has {x.size}"
                f" ({x.nbytes} bytes): receive into an array at least as large"
            )
        if fault:
            self._steps = self._refuse(message, fault)
        elif self._posted is not None:
            self._steps = p2p_device.receive(x, self._posted, message, size_bytes)
        else:
            exact = route.plain and size_bytes == route.size_bytes
            self._awaited = message.Irecv((x, MPI.BYTE) if exact else as_message(x, size_bytes))
            return
        self._awaited = READY  # The steps begin when the receive is no longer posted.

    def _refuse(self, message: MPI.Message | Letter, fault: str) -> Steps:
        yield message.Irecv(as_message(np.empty(self.size_bytes, np.uint8), self.size_bytes))
        sender = f"rank {self.sender} of the group"
        raise ArrayError(f"a receive met a message from {sender} (tag {self._route.call.tag}) of {fault}")


class Mailbox(Resource):
    """The messages of a group on this rank: posted receives, messages that no receive takes yet, and pending sends.

    All arrays have passed `message.as_array`, so an array that is not NumPy's is CuPy's.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._transport = link.find(Transport) or Transport(link)
        # In Open MPI only COMM_WORLD is sure to have this attribute.
        upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.max_tag: int = (upper if isinstance(upper, int) else 32767) // CODES - 2
        self.polls = link.monitor.polls
        self._looks = _LOOKS // 3 if link.world.crowded else _LOOKS
        self._arrivals: Iterator[Arrival | None] = iter(self._transport.arrive, object())
        """An endless iterator: each step returns the next message that has come, or None."""
        self._arrived: list[Arrival] = []
        self._comes_again = False
        """True if a message was put back at a Ctrl-C. This message comes before all others."""
        self.sender = self.size_bytes = -1
        """Sender and size of the last message that `recv` has taken out of a FIFO. `Lane.take` sets them."""
        self._posted: deque[Message] = deque()
        self._routes: dict[Any, Route] = {}
        self.route = self._routes.get
        self._moving: dict[Message, None] = {}
        """Messages that have begun to move: all pending ones but the posted receives."""
        self._departing: defaultdict[int, deque[object]] = defaultdict(deque)

    def add_route(self, key: tuple[Any, ...], peer: int, x: Array, ranks: Sequence[int]) -> Route:
        """Return the route of a checked message, and remember it for `route` if the array is NumPy's.

        The key is the operation, the global rank, the tag, the dtype and the shape.
        """
        self._transport.comm.Improbe  # noqa: B018 - raises if the group is aborted
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        link, (name, _, tag, *_) = self.link, key
        peers = link.others if peer == ANY_SOURCE else (link.ranks[peer],)
        call, code = Call(link.members, name, x.dtype, x.shape, peers, tag), tag * CODES + dtype_code(x.dtype)
        lane = self._transport.lane(x, peer, code, call.sends) if plain(x) else None
        route = Route(self, call, peer, code, x.nbytes, plain(x), ranks, lane)
        if type(x) is ndarray:
            self._routes[key] = route
        return route

    def pending(self) -> int:
        return len(self._moving) + len(self._posted)

    def unmatched(self) -> list[tuple[int, int, str, int]]:
        """Return sender (group rank), tag, dtype and bytes of messages without a receive. Any thread may ask."""
        found = [arrival[:3] for arrival in tuple(self._arrived)] + self._transport.unmatched()
        return [(source, code // CODES, code_name(code % CODES), size) for source, code, size in found]

    def drop(self, error: DistError) -> None:
        """End all messages with ``error``, unless the ranks only disagree about collectives.

        Such ranks may still exchange messages.
        """
        if not isinstance(error, MismatchError):
            self._transport.abort(error)
            self._routes.clear()
            self.fail_pending(error)

    def close(self) -> None:
        """Note in the link if there are messages that nobody has received.

        If the communicator were freed, the next group could get its context, and receive these messages.
        """
        mine = self._comes_again or any(type(arrival[-1]) is not Letter for arrival in self._arrived)
        self.link.may_hold_messages |= mine or self._transport.holds_messages()

    def send(self, x: Array, route: Route) -> Awaited | None:
        """Begin to send, and return the request. Return None if a device or an earlier message has to be awaited first.

        In that case `isend` sends the message.
        """
        if type(x) is not ndarray or (self._departing and self._departing.get(route.peer)):
            return None
        if route.lane is not None and route.lane.put(x):
            return READY
        what = (x, MPI.BYTE) if route.plain else as_message(x, route.size_bytes)
        return self._transport.Isend(what, route.peer, route.code)

    def isend(self, x: Array, route: Route, entry: list[Any], request: Awaited | None) -> Message:
        """Return the message for which `send` has returned ``request``.

        If ``request`` is None, send the message after the earlier ones to the same rank.
        """
        lock.acquire()
        try:
            send = Message(route, x, entry)
            if request is None:
                to = route.peer
                send._steps = p2p_device.send(x, self._departing[to], self._transport, to, route.code)
                send._resume(send._steps)
            else:
                send._awaited = request
            self._moving[send] = active[self] = None
        finally:
            lock.release()
        return send

    def recv(self, x: Array, route: Route) -> tuple[int, Awaited] | None:
        """Receive a message if it comes within a moment. The caller knows that nothing is pending in this process.

        Return the sender and what is left to wait for. Return None, and leave the receive to `irecv`, if no message
        comes, if it does not fit, or if earlier messages or receives are not matched yet.
        """
        lane = route.lane
        for _ in range(self._looks):
            with lock:
                if self._arrived or self._comes_again or self._posted:
                    return None
                if lane is not None and lane.take(x, self._looks, self):
                    return self.sender, READY
                for arrival in self._arrivals:  # noqa: B007 - `arrival` is read below
                    break
                if arrival is None:
                    continue
                sender, code, size_bytes, message = arrival
                if code == route.code and size_bytes <= route.size_bytes and route.peer in (sender, ANY_SOURCE):
                    exact = route.plain and size_bytes == route.size_bytes
                    return sender, message.Irecv((x, MPI.BYTE) if exact else as_message(x, size_bytes))
                self._arrived.append(arrival)
        return None

    def irecv(self, x: Array, route: Route, entry: list[Any]) -> Message:
        """Post a receive. Messages go to the receives in the order of these calls."""
        lock.acquire()
        try:
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

    def give_up(self, entry: list[Any]) -> None:
        """End the message of a call that a Ctrl-C has ended, because nobody waits for it any more."""
        with lock:
            for each in [each for each in (*self._posted, *self._moving) if each._entry is entry]:
                each._fail(interrupted())

    def withdraw(self, receive: Message) -> None:
        """Take a receive out of the posted ones, so that it takes no message and ends when the mailbox is polled."""
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

    def _take(self, receive: Message) -> Arrival | None:
        for index, arrival in enumerate(self._arrived):
            if receive.matches(arrival):
                return self._arrived.pop(index)
        return None

    def _match(self, awaited: Message | None = None, looks: int = 1) -> None:
        """Receive messages for the posted receives, until ``looks`` looks have found none or ``awaited`` has ended."""
        posted = self._posted
        while posted and looks:
            receive, unmatched = posted[0], None
            lane, arrival = receive._route.lane, None
            try:
                if lane and not self._comes_again and lane.take(receive._outputs[0], looks, receive):
                    posted.popleft()
                    receive._finish(None)
                else:
                    for arrival in self._arrivals:  # noqa: B007 - `arrival` is read below
                        break
                    if arrival is None:
                        looks -= 1
                        continue
                    for receive in posted:
                        if receive.matches(arrival):
                            receive.accept(arrival)
                            posted.remove(receive)
                            break
                    else:
                        unmatched = arrival
                    self._comes_again = False
            except MPI.Exception:
                raise
            except BaseException:  # a Ctrl-C, which must not lose a message
                self._comes_again &= arrival is None
                if receive._awaited is not None:  # The receive has taken the message, and goes on.
                    self.withdraw(receive)
                    self._moving[receive] = None
                elif arrival and arrival[-1]:  # The message has not been received, and is the next one again.
                    self._arrivals, self._comes_again = chain((arrival,), self._arrivals), True
                elif receive.sender >= 0:  # The receive has taken a message, and must not take another.
                    receive._fail(interrupted())
                    self._moving[receive] = None
                raise
            if unmatched is not None:  # no receive for this message is posted yet
                self._arrived.append(unmatched)
                continue
            if not receive._finished:
                self._moving[receive] = None
                self._end(receive)
            elif receive._callbacks:
                receive._announce()
            if receive is awaited:
                return

    def _end(self, message: Message, looks: int = 1) -> None:
        while not message._advance():
            looks -= 1
            if not looks:
                return
        self._moving.pop(message, None)  # another thread or a callback may have ended the message
        if message._callbacks:
            message._announce()

    def progress_of(self, message: Message) -> None:
        lock.acquire()
        try:
            if message._awaited is None:
                self._match(message, self._looks)
            if message._awaited is not None:
                self._end(message, _LOOKS)
        except MPI.Exception as error:  # a rank may have failed
            self.fail_pending(error)
        finally:
            lock.release()

    def progress(self) -> None:
        try:
            self._match()
        except MPI.Exception as error:  # the messages' `wait` raises it, not the poll
            self.fail_pending(error)
        for message in tuple(self._moving):  # the loop runs over a copy, because callbacks may send and poll
            self._end(message)
        if not (self._moving or self._posted):
            active.pop(self, None)

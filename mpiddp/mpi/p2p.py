"""Point to point: messages that know their dtype and their length before MPI sees a buffer.

A receive that is too short cannot be mended after the fact: Open MPI hangs or crashes in it, depending on the size. So
nothing is received unseen. Arrived messages are taken off MPI in their order (a matched probe), matched here by source
and tag with the receives in theirs, checked, and only then received. The dtype travels in the tag.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from mpiddp.device import is_device_array
from mpiddp.errors import ArrayError, DistError, MismatchError
from mpiddp.typing import Array

from . import p2p_device
from .lazy import MPI
from .link import Link, Resource, aborted
from .message import CODES, as_message, code_name, dtype_code, size_of
from .operation import Operation
from .p2p_device import Departure, DeviceReceive, Running
from .requests import Steps, activate, deactivate, drive
from .work import Work

ANY_SOURCE: int = -1
"""A receive from any source."""


class _Arrival(NamedTuple):
    """A message that has arrived and is not received."""

    source: int
    tag: int
    code: int
    size_bytes: int
    message: MPI.Message


class Receive:
    """A posted receive: waits for its message, then for its bytes.

    Parameters
    ----------
    x : array
        The buffer.
    source : int
        Group rank of the sender, or ANY_SOURCE.
    tag : int
        The tag that the message must have.
    """

    __slots__ = ("_device", "_fault", "_request", "_source", "_tag", "sender", "size_bytes", "x")

    def __init__(self, x: Array, source: int, tag: int) -> None:
        self.x, self._source, self._tag = x, source, tag
        self._device = DeviceReceive(x) if _on_device(x) else None
        self._request: MPI.Request | Running | None = None
        self._fault: str | None = None
        self.sender = -1
        """Group rank of the sender, once it is known."""
        self.size_bytes = 0
        """Length of the received message in bytes; a shorter one fills the beginning of the buffer."""

    def matches(self, arrival: _Arrival) -> bool:
        """Tell whether this receive is for ``arrival``."""
        return arrival.tag == self._tag and self._source in (ANY_SOURCE, arrival.source)

    def accept(self, arrival: _Arrival) -> None:
        """Begin to receive ``arrival``, or take it away and refuse it, so that the next message is right."""
        self.sender, self.size_bytes = arrival.source, arrival.size_bytes
        memory = self.x
        if arrival.code != dtype_code(self.x.dtype):
            self._fault = f"{code_name(arrival.code)}, but its buffer is {self.x.dtype}: use one dtype on both sides"
        elif arrival.size_bytes > self.x.nbytes:
            self._fault = (
                f"{arrival.size_bytes // self.x.itemsize} elements ({arrival.size_bytes} bytes), but its buffer has"
                f" {self.x.size} ({self.x.nbytes} bytes): receive into an array at least as large"
            )
        if self._fault is not None:
            memory = np.empty(arrival.size_bytes, np.uint8)
        elif self._device is not None:
            self._request = self._device.receive(arrival.message, arrival.size_bytes)
            return
        self._request = arrival.message.Irecv(as_message(memory, arrival.size_bytes))

    def _check(self) -> None:
        if self._fault is not None:
            sender = f"rank {self.sender} of the group"
            raise ArrayError(f"a receive met a message from {sender} (tag {self._tag}) of {self._fault}")

    def Test(self) -> bool:  # noqa: N802
        """Tell whether the message is in the buffer; raise `ArrayError` if it did not fit."""
        if self._request is None or not self._request.Test():
            return False
        self._check()
        return True

    def Wait(self) -> None:  # noqa: N802
        """Block until the message, which must have been matched, is in the buffer; raise as `Test` does."""
        assert self._request is not None
        self._request.Wait()
        self._check()


def _on_device(x: Array) -> bool:
    return type(x) is not np.ndarray and is_device_array(x)  # most arrays are NumPy's: no look-up of CuPy for them


class Mailbox(Resource):
    """The point-to-point messages of a group.

    Parameters
    ----------
    link : Link
        The group.
    """

    def __init__(self, link: Link) -> None:
        self._comm = link.messages
        upper = self._comm.Get_attr(MPI.TAG_UB)
        self.max_tag: int = (upper if isinstance(upper, int) else 32767) // CODES - 2
        """The largest tag that a program may use."""
        self.private_tag = self.max_tag + 1
        """One that it may not: for what the package itself has to say."""
        self._status = MPI.Status()
        self._arrived: list[_Arrival] = []
        self._posted: deque[Receive] = deque()
        self._works: dict[Work, None] = {}
        self._departing: defaultdict[int, deque[Departure]] = defaultdict(deque)

    def pending(self) -> int:
        """Return the number of messages that have begun and not finished."""
        return len(self._works)

    def drop(self, error: DistError) -> None:
        """End all messages with ``error``; where ranks disagree about collectives, messages go on."""
        if not isinstance(error, MismatchError):
            self.fail(error)

    def send(self, x: Array, to: int, tag: int) -> None:
        """Send ``x`` and block until its memory may be used again."""
        if _on_device(x):
            drive(p2p_device.send(x, Departure(self._departing[to]), self._comm, to, tag * CODES + dtype_code(x.dtype)))
            return
        self._comm.Send(as_message(x, x.nbytes), to, tag * CODES + dtype_code(x.dtype))

    def isend(self, x: Array, to: int, tag: int, what: Operation) -> Work:
        """Begin to send ``x``."""
        code = tag * CODES + dtype_code(x.dtype)
        if self._departing[to] or _on_device(x):
            return self._submit(
                Work(p2p_device.send(x, Departure(self._departing[to]), self._comm, to, code), what, [x])
            )

        def steps() -> Steps:
            yield self._comm.Isend(as_message(x, x.nbytes), to, code)

        return self._submit(Work(steps(), what, [x]))

    def recv(self, x: Array, source: int, tag: int) -> int:
        """Receive into ``x``, blocking in MPI, and return the sender; only while nothing is on its way in this process.

        Most often the next message is the one, and fits.
        """
        wanted, status = MPI.ANY_SOURCE if source == ANY_SOURCE else source, self._status
        if not self._arrived and type(x) is np.ndarray:
            message = self._comm.Mprobe(wanted, MPI.ANY_TAG, status)
            if status.Get_tag() == tag * CODES + dtype_code(x.dtype):
                size_bytes = size_of(status)
                if size_bytes <= x.nbytes:
                    message.Recv(as_message(x, size_bytes))
                    return status.Get_source()
            self._arrived.append(self._arrival(message))
        receive = Receive(x, source, tag)
        arrival = self._take(receive)
        while arrival is None:
            self._arrived.append(self._arrival(self._comm.Mprobe(wanted, MPI.ANY_TAG, status)))
            arrival = self._take(receive)
        receive.accept(arrival)
        receive.Wait()
        return receive.sender

    def irecv(self, x: Array, source: int, tag: int, what: Operation) -> tuple[Receive, Work]:
        """Post a receive into ``x``; messages go to receives in the order of their posting."""
        receive = Receive(x, source, tag)

        def steps() -> Steps:
            arrival = self._take(receive)
            if arrival is None:
                self._posted.append(receive)
            else:
                receive.accept(arrival)
            yield receive

        return receive, self._submit(Work(steps(), what, [x]))

    def withdraw(self, receive: Receive, work: Work) -> None:
        """Give up a receive whose message has not come."""
        if receive in self._posted:
            self._posted.remove(receive)
            work.abandon()
            del self._works[work]

    def fail(self, error: DistError) -> None:
        """End all messages with ``error``, which every further use raises, too."""
        self._comm = aborted(error)
        self.fail_pending(error)

    def fail_pending(self, error: BaseException) -> None:
        """End all messages that have begun with ``error``."""
        works = tuple(self._works)
        self._works.clear()
        self._posted.clear()
        deactivate(self)
        for work in works:
            work.fail(error)
            work.announce()

    def _submit(self, work: Work) -> Work:
        self._works[work] = None
        activate(self)
        return work

    def _arrival(self, message: MPI.Message) -> _Arrival:
        tag, code = divmod(self._status.Get_tag(), CODES)
        return _Arrival(self._status.Get_source(), tag, code, size_of(self._status), message)

    def _take(self, receive: Receive) -> _Arrival | None:
        """Return the first arrived message that is for ``receive``."""
        for index, arrival in enumerate(self._arrived):
            if receive.matches(arrival):
                return self._arrived.pop(index)
        return None

    def progress(self) -> None:
        """Hand arrived messages to the posted receives, and drive what is on its way."""
        while self._posted:
            try:
                message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            except MPI.Exception as error:  # a rank has died; surfaces in wait(), and not in whoever polls
                self.fail_pending(error)
                return
            if message is None:
                break
            arrival = self._arrival(message)
            receive = next((posted for posted in self._posted if posted.matches(arrival)), None)
            if receive is None:
                self._arrived.append(arrival)
            else:
                self._posted.remove(receive)
                receive.accept(arrival)
        for work in tuple(self._works):  # whose callbacks may send and poll
            if work.advance():
                self._works.pop(work, None)
                work.announce()
        if not self._works:
            deactivate(self)

"""Point to point: a message's dtype and length are checked before MPI gets the receiver's memory.

Open MPI hangs or crashes in a receive that is too short. Therefore a matched probe takes the messages in order. Here
they are matched with the posted receives, checked, and only then received. The dtype travels in the tag.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from mpiddp.errors import ArrayError, DistError, MismatchError
from mpiddp.typing import Array

from . import p2p_device, requests
from .lazy import MPI
from .link import Link, Resource, aborted
from .message import CODES, as_message, code_name, dtype_code, movable, size_of
from .operation import Call, Operation
from .p2p_device import Departure, DeviceReceive
from .requests import Probe, activate, deactivate
from .work import Work

_EAGER_BYTES = 1 << 10
"""A message of at most this length arrives together with its envelope, so that its receive does not wait."""
_LOOKS = 10
"""Looks of a wait for one message before it yields the core; the other side is mostly about to send."""
ANY_SOURCE: int = -1


def code_of(x: Array, tag: int) -> int:
    """Return the number that MPI gets as the tag: of the program's tag, and of the dtype."""
    return tag * CODES + dtype_code(x.dtype)


class _Arrival(NamedTuple):
    source: int
    code: int
    size_bytes: int
    message: MPI.Message


class Message(Work):
    _mailbox: Mailbox

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._finished:
            self._mailbox.progress_of(self)
        if timeout is None and self._finished and self._error is None:
            return True
        return Work.wait(self, timeout)


class Send(Message):
    def __init__(self, mailbox: Mailbox, operation: Operation, x: Array, request: MPI.Request) -> None:
        self._mailbox, self._operation, self._outputs, self._awaited = mailbox, operation, (x,), request
        requests.pending += 1


class Receive(Message):
    sender = -1
    size_bytes = 0
    """The message's size, which may be less than the array's."""
    _fault = ""
    _device: DeviceReceive | None = None

    def __init__(
        self, mailbox: Mailbox, operation: Operation, x: Array, source: int, code: int, global_ranks: Sequence[int]
    ) -> None:
        self._mailbox, self._operation, self._outputs = mailbox, operation, (x,)
        self._x, self._source, self._code, self._global_ranks = x, source, code, global_ranks
        requests.pending += 1
        if type(x) is not np.ndarray:
            self._device = DeviceReceive(x)

    def source_rank(self) -> int:
        return self._global_ranks[self.sender] if self._finished else super().source_rank()

    def count(self) -> int:
        return self.size_bytes // max(self._x.itemsize, 1) if self._finished else super().count()

    def matches(self, arrival: _Arrival) -> bool:
        return arrival.code // CODES == self._code // CODES and self._source in (ANY_SOURCE, arrival.source)

    def takes(self, status: MPI.Status, message: MPI.Message) -> bool:
        """Begin to receive a message, as the first of the posted receives; return False if it does not match or fit."""
        x, source, size_bytes = self._x, status.Get_source(), status.Get_count(MPI.BYTE)
        if (
            status.Get_tag() != self._code
            or not 0 <= size_bytes <= x.nbytes
            or (self._source != source and self._source != ANY_SOURCE)
            or self._device is not None
        ):
            return False
        self.sender, self.size_bytes = source, size_bytes
        self._mailbox.posted.popleft()
        if size_bytes > _EAGER_BYTES:
            self._awaited = message.Irecv(as_message(x, size_bytes))
        else:
            message.Recv([movable(x), size_bytes, MPI.BYTE])  # does not wait: all of it has arrived
            self._finish(None)
        return True

    def accept(self, arrival: _Arrival) -> None:
        """Begin to receive a message. One that does not fit is received into other memory, and `wait` raises."""
        x, size_bytes = self._x, arrival.size_bytes
        self.sender, self.size_bytes = arrival.source, size_bytes
        if arrival.code != self._code:
            self._fault = f"{code_name(arrival.code % CODES)}, but its buffer is {x.dtype}: use one dtype on both sides"
        elif size_bytes > x.nbytes:
            self._fault = (
                f"{size_bytes // x.itemsize} elements ({size_bytes} bytes), but its buffer has {x.size} ({x.nbytes}"
                " bytes): receive into an array at least as large"
            )
        elif self._device is not None:
            self._awaited = self._device.receive(arrival.message, size_bytes)
            return
        memory = np.empty(size_bytes, np.uint8) if self._fault else x
        self._awaited = arrival.message.Irecv(as_message(memory, size_bytes))

    def _advance(self) -> bool:
        if not self._finished and self._awaited is not None:
            try:
                if self._awaited.Test():
                    self._finish(self._refusal() if self._fault else None)
            except Exception as error:
                self._finish(error)
        return self._finished

    def _refusal(self) -> ArrayError:
        sender = f"rank {self.sender} of the group"
        return ArrayError(f"a receive met a message from {sender} (tag {self._code // CODES}) of {self._fault}")


class Mailbox(Resource):
    """The messages of a group on this rank: posted receives, messages without one, pending sends.

    Arrays come here through `message.as_array`: whatever is not NumPy's is CuPy's.
    """

    def __init__(self, link: Link) -> None:
        self._comm = link.messages
        upper = self._comm.Get_attr(MPI.TAG_UB)
        self.max_tag: int = (upper if isinstance(upper, int) else 32767) // CODES - 2
        self._status = MPI.Status()
        self._arrived: list[_Arrival] = []
        self.posted: deque[Receive] = deque()
        self.calls: dict[Any, tuple[Call, int]] = {}
        self._works: dict[Work, None] = {}
        self._departing: defaultdict[int, deque[Departure]] = defaultdict(deque)

    def pending(self) -> int:
        return len(self._works)

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

    def takes_no_turn(self, x: Array, to: int) -> bool:
        """Return True if a message may leave at once: it is in host memory, and no earlier one is still to leave."""
        return type(x) is np.ndarray and not self._departing.get(to)

    def send(self, x: Array, to: int, code: int) -> MPI.Request | None:
        """Send what `takes_no_turn`; return what is left to wait for."""
        request = self._comm.Isend(as_message(x, x.nbytes), to, code)
        return None if request.Test() else request

    def isend(self, x: Array, to: int, code: int, operation: Operation, request: MPI.Request | None = None) -> Work:
        """Send, with the request if it is already on its way."""
        requests.lock.acquire()
        try:
            if request is None and not self.takes_no_turn(x, to):
                steps = p2p_device.send(x, Departure(self._departing[to]), self._comm, to, code)
                return self._submit(Work(steps, operation, (x,)))
            return self._submit(
                Send(self, operation, x, request or self._comm.Isend(as_message(x, x.nbytes), to, code))
            )
        finally:
            requests.lock.release()

    def recv(self, x: Array, source: int, code: int, probe: Probe) -> tuple[int, MPI.Request | None] | None:
        """Receive into a host array. Only while nothing is pending in this process.

        Return the sender and what is left to wait for; or None, and leave it to `irecv`, if ``probe`` finds no message,
        or one that has to wait for another receive or does not fit.
        """
        if self._arrived:
            return None
        status = self._status
        message = probe(self._comm, MPI.ANY_SOURCE if source == ANY_SOURCE else source, MPI.ANY_TAG, status)
        if message is None:
            return None
        size_bytes = size_of(status)
        if status.Get_tag() != code or size_bytes > x.nbytes:
            self._arrived.append(self._arrival(message))
            return None
        sender = status.Get_source()
        if size_bytes <= _EAGER_BYTES:
            message.Recv([movable(x), size_bytes, MPI.BYTE])  # does not wait: all of it has arrived
            return sender, None
        request = message.Irecv(as_message(x, size_bytes))
        return sender, None if request.Test() else request

    def irecv(
        self, x: Array, source: int, code: int, operation: Operation, global_ranks: Sequence[int] = ()
    ) -> Receive:
        """Post a receive. Messages go to the receives in the order of these calls."""
        requests.lock.acquire()
        try:
            receive = Receive(self, operation, x, source, code, global_ranks)
            arrival = self._take(receive) if self._arrived else None
            if arrival is None:
                self.posted.append(receive)
            else:
                receive.accept(arrival)
                if receive._advance():
                    return receive
            self._submit(receive)
        finally:
            requests.lock.release()
        return receive

    def fail_pending(self, error: BaseException) -> None:
        with requests.lock:
            works = tuple(self._works)
            self._works.clear()
            self.posted.clear()
            deactivate(self)
            for work in works:
                work._fail(error)
                work._announce()

    def _submit(self, work: Work) -> Work:
        self._works[work] = None
        activate(self)
        return work

    def _arrival(self, message: MPI.Message) -> _Arrival:
        status = self._status
        return _Arrival(status.Get_source(), status.Get_tag(), size_of(status), message)

    def _take(self, receive: Receive) -> _Arrival | None:
        for index, arrival in enumerate(self._arrived):
            if receive.matches(arrival):
                return self._arrived.pop(index)
        return None

    def _match(self) -> None:
        posted, status = self.posted, self._status
        while posted:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return
            first = posted[0]
            receive = first if first.takes(status, message) else self._sort(self._arrival(message))
            if receive is not None and receive._advance():
                self._end(receive)

    def _sort(self, arrival: _Arrival) -> Receive | None:
        """Give a message to the first receive that it matches, or keep it."""
        for receive in self.posted:
            if receive.matches(arrival):
                self.posted.remove(receive)
                receive.accept(arrival)
                return receive
        self._arrived.append(arrival)
        return None

    def _end(self, message: Work) -> None:
        del self._works[message]
        if not self._works:
            deactivate(self)
        message._announce()

    def progress_of(self, message: Message) -> None:
        requests.lock.acquire()
        try:
            for _ in range(_LOOKS):
                if self.posted:
                    self._match()
                if message._finished:
                    break
                if message._awaited is not None and message in self._works and message._advance():
                    self._end(message)
                    break
        except MPI.Exception as error:  # a rank has failed
            self.fail_pending(error)
        finally:
            requests.lock.release()

    def progress(self) -> None:
        try:
            self._match()
        except MPI.Exception as error:  # an error of wait(), not of the poll
            self.fail_pending(error)
            return
        for message in tuple(self._works):  # a copy, because callbacks may send and poll
            if message in self._works and message._advance():
                self._end(message)
        if not self._works:
            deactivate(self)

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
from .requests import activate, deactivate, drive, matched_probe
from .work import Work

_EAGER_BYTES = 1 << 10
"""A message of at most this length arrives together with its envelope, so that its receive does not wait."""
_LOOKS = 10
"""Looks of a wait for one message before it yields the core; the other side is mostly about to send."""
ANY_SOURCE: int = -1


class _Arrival(NamedTuple):
    source: int
    tag: int
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
        self, mailbox: Mailbox, operation: Operation, x: Array, source: int, tag: int, global_ranks: Sequence[int]
    ) -> None:
        self._mailbox, self._operation, self._outputs = mailbox, operation, (x,)
        self._x, self._source, self._tag, self._global_ranks = x, source, tag, global_ranks
        requests.pending += 1
        if type(x) is not np.ndarray:
            self._device = DeviceReceive(x)

    def source_rank(self) -> int:
        return self._global_ranks[self.sender] if self._finished else super().source_rank()

    def count(self) -> int:
        return self.size_bytes // max(self._x.itemsize, 1) if self._finished else super().count()

    def matches(self, arrival: _Arrival) -> bool:
        return arrival.tag == self._tag and self._source in (ANY_SOURCE, arrival.source)

    def take(self, source: int, code: int, size_bytes: int, message: MPI.Message) -> bool:
        """Begin to receive a message if it matches and fits; return False if not, and leave it to `accept`."""
        x = self._x
        if (
            size_bytes > x.nbytes
            or code != self._tag * CODES + dtype_code(x.dtype)
            or self._device is not None
            or self._source not in (ANY_SOURCE, source)
        ):
            return False
        self.sender, self.size_bytes = source, size_bytes
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
        if arrival.code != dtype_code(x.dtype):
            self._fault = f"{code_name(arrival.code)}, but its buffer is {x.dtype}: use one dtype on both sides"
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
        return ArrayError(f"a receive met a message from {sender} (tag {self._tag}) of {self._fault}")

    def wait_matched(self) -> None:
        """Block until the message that was accepted is here; raise if it does not fit."""
        if self._awaited is not None:
            self._awaited.Wait()
            self._finish(self._refusal() if self._fault else None)
        if self._error is not None:
            raise self._error


class Mailbox(Resource):
    """The messages of a group on this rank: posted receives, messages without one, pending sends.

    Arrays come here through `message.as_array`: whatever is not NumPy's is CuPy's.
    """

    def __init__(self, link: Link) -> None:
        self._comm = link.messages
        upper = self._comm.Get_attr(MPI.TAG_UB)
        self.max_tag: int = (upper if isinstance(upper, int) else 32767) // CODES - 2
        self.private_tag = self.max_tag + 1
        self._status = MPI.Status()
        self._arrived: list[_Arrival] = []
        self._posted: deque[Receive] = deque()
        self.calls: dict[Any, Call] = {}
        self._works: dict[Work, None] = {}
        self._departing: defaultdict[int, deque[Departure]] = defaultdict(deque)

    def pending(self) -> int:
        return len(self._works)

    def unmatched(self) -> list[tuple[int, int, str, int]]:
        """Return sender (group rank), tag, dtype and bytes of messages without a receive. Any thread may ask."""
        arrived = [(each.source, each.tag, each.code, each.size_bytes) for each in tuple(self._arrived)]
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):  # one more, which no receive has probed for
            arrived.append((status.Get_source(), *divmod(status.Get_tag(), CODES), size_of(status)))
        return [(source, tag, code_name(code), size) for source, tag, code, size in arrived if tag <= self.max_tag]

    def drop(self, error: DistError) -> None:
        """End all messages with ``error``. Ranks that disagree about collectives may still exchange messages."""
        if not isinstance(error, MismatchError):
            self.fail(error)

    def send(self, x: Array, to: int, tag: int) -> None:
        """Send, and block until the memory may be used again."""
        code = tag * CODES + dtype_code(x.dtype)
        if type(x) is not np.ndarray:
            drive(p2p_device.send(x, Departure(self._departing[to]), self._comm, to, code))
        else:
            self._comm.Send(as_message(x, x.nbytes), to, code)

    def isend(self, x: Array, to: int, tag: int, operation: Operation) -> Work:
        code = tag * CODES + dtype_code(x.dtype)
        requests.lock.acquire()
        try:
            if type(x) is not np.ndarray or self._departing.get(to):
                steps = p2p_device.send(x, Departure(self._departing[to]), self._comm, to, code)
                return self._submit(Work(steps, operation, (x,)))
            sent = Send(self, operation, x, self._comm.Isend(as_message(x, x.nbytes), to, code))
            return sent if sent._advance() else self._submit(sent)
        finally:
            requests.lock.release()

    def recv(self, x: Array, source: int, tag: int, operation: Operation) -> int:
        """Receive, blocking in MPI, and return the sender. Only while nothing is pending in this process."""
        wanted, status = MPI.ANY_SOURCE if source == ANY_SOURCE else source, self._status
        if not self._arrived and type(x) is np.ndarray:
            code, most_bytes = tag * CODES + dtype_code(x.dtype), x.nbytes
            whole = as_message(x, most_bytes)  # made before the message is here, when there is time
            message = matched_probe(self._comm, wanted, MPI.ANY_TAG, status)
            if status.Get_tag() == code:
                size_bytes = size_of(status)
                if size_bytes <= most_bytes:
                    message.Recv(whole if size_bytes == most_bytes else as_message(x, size_bytes))
                    return status.Get_source()
            self._arrived.append(self._arrival(message))
        receive = Receive(self, operation, x, source, tag, ())
        try:
            arrival = self._take(receive)
            while arrival is None:
                self._arrived.append(self._arrival(matched_probe(self._comm, wanted, MPI.ANY_TAG, status)))
                arrival = self._take(receive)
            receive.accept(arrival)
            receive.wait_matched()
        except BaseException as error:
            receive._fail(error)
            raise
        return receive.sender

    def irecv(self, x: Array, source: int, tag: int, operation: Operation, global_ranks: Sequence[int] = ()) -> Receive:
        """Post a receive. Messages go to the receives in the order of these calls."""
        requests.lock.acquire()
        try:
            receive = Receive(self, operation, x, source, tag, global_ranks)
            arrival = self._take(receive) if self._arrived else None
            if arrival is None:
                self._posted.append(receive)
            else:
                receive.accept(arrival)
                if receive._advance():
                    return receive
            self._submit(receive)
        finally:
            requests.lock.release()
        return receive

    def withdraw(self, receive: Receive) -> None:
        """Cancel a receive whose message has not arrived."""
        with requests.lock:
            if receive in self._posted:
                self._posted.remove(receive)
                receive._abandon()
                del self._works[receive]

    def fail(self, error: DistError) -> None:
        self._comm = aborted(error)
        self.fail_pending(error)

    def fail_pending(self, error: BaseException) -> None:
        with requests.lock:
            works = tuple(self._works)
            self._works.clear()
            self._posted.clear()
            deactivate(self)
            for work in works:
                work._fail(error)
                work._announce()

    def _submit(self, work: Work) -> Work:
        self._works[work] = None
        activate(self)
        return work

    def _arrival(self, message: MPI.Message) -> _Arrival:
        tag, code = divmod(self._status.Get_tag(), CODES)
        return _Arrival(self._status.Get_source(), tag, code, size_of(self._status), message)

    def _take(self, receive: Receive) -> _Arrival | None:
        for index, arrival in enumerate(self._arrived):
            if receive.matches(arrival):
                return self._arrived.pop(index)
        return None

    def _match(self) -> None:
        while self._posted:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            if message is None:
                return
            status, first = self._status, self._posted[0]
            if first.take(status.Get_source(), status.Get_tag(), size_of(status), message):
                self._posted.popleft()
                if first._advance():
                    self._end(first)
                continue
            arrival = self._arrival(message)
            receive = next((posted for posted in self._posted if posted.matches(arrival)), None)
            if receive is None:
                self._arrived.append(arrival)
            else:
                self._posted.remove(receive)
                receive.accept(arrival)
                if receive._advance():
                    self._end(receive)

    def _end(self, message: Work) -> None:
        del self._works[message]
        if not self._works:
            deactivate(self)
        message._announce()

    def progress_of(self, message: Message) -> None:
        requests.lock.acquire()
        try:
            for _ in range(_LOOKS):
                self._match()
                if message in self._works and message._advance():
                    self._end(message)
                if message._finished:
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

"""Liveness: ranks that have waited long ask each other how far they have come.

Nothing is sent while all goes well. A rank that has waited for seconds in an operation asks others; each answers from
its watchdog thread (also while its program computes) or from its wait at exit (after its program has ended) with the
number of operations of that group that it has begun, whether its program has ended, and what it is doing. So the waiter
decides that a rank is missing, and a rank that has merely finished early harms nobody.
"""

from __future__ import annotations

import struct
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Operation, waiting

_QUESTION, _ANSWER = 1, 2
_GROUP, _HEAD = struct.Struct("<q"), struct.Struct("<qq??")
SILENCE_S = 3.0
"""A rank that has not answered for so long is silent: watchdogs look twice a second."""
_STATE_BYTES = 300
_MAX_NAMED = 8
_MAX_RETIRED = 1000


class Answer(NamedTuple):
    """The state of a rank in a group."""

    sequence: int
    """Operations of the group that it has begun."""
    ended: bool
    """True if its program has ended, so that it will begin no more."""
    idle: bool
    """True if nothing is pending in it."""
    doing: str
    """Its current activity, for a person."""


class Liveness:
    """The questions and answers of one process, on a communicator of their own.

    Parameters
    ----------
    comm : MPI.Intracomm
        A duplicate of the world; freed with the process.
    watched : bool
        Whether the ranks have watchdogs that answer while their programs compute.
    """

    def __init__(self, comm: MPI.Intracomm, watched: bool) -> None:
        self._comm = comm
        self._watched = watched
        self._lock = threading.Lock()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        self._retired: deque[tuple[int, int]] = deque(maxlen=_MAX_RETIRED)
        self.exited = False
        """True if this rank's program has ended."""

    def register(self, link: Link) -> None:
        """Answer questions about a group."""
        self._links[link.id] = link

    def retire(self, link: Link) -> None:
        """Remember a destroyed group for a while, because peers may still be in its last operation."""
        self._links.pop(link.id, None)
        self._retired.append((link.id, link.sequence))

    def sequence(self, group: int) -> int:
        """Return the number of a group's operations that this rank has begun."""
        link = self._links.get(group)
        if link is not None:
            return link.sequence
        return next((sequence for number, sequence in reversed(self._retired) if number == group), 0)

    def _forget_sent(self) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]

    def _send(self, to: int, tag: int, message: bytes) -> None:
        self._sent.append((self._comm.Isend([message, MPI.BYTE], to, tag), message))

    def progress(self) -> None:
        """Answer the questions, and keep the answers, that have arrived."""
        with self._lock:
            self._forget_sent()
            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, tag = status.Get_source(), status.Get_tag()
                message = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([message, MPI.BYTE], source, tag)
                if tag == _QUESTION:
                    self._send(source, _ANSWER, self._answer(*_GROUP.unpack(message)))
                else:
                    group, sequence, ended, idle = _HEAD.unpack_from(message)
                    doing = message[_HEAD.size :].decode(errors="replace")
                    self._answers[source, group] = Answer(sequence, ended, idle, doing)

    def _answer(self, group: int) -> bytes:
        ended = self.exited or _left_to_threads()
        head = _HEAD.pack(group, self.sequence(group), ended, requests.pending == 0)
        return head + ("its program has ended" if ended else _doing()).encode()[:_STATE_BYTES]

    def ask(self, operation: Operation, ranks: Sequence[int]) -> None:
        """Ask ``ranks`` how far they have come in the group of ``operation``."""
        group = operation.members.number
        with self._lock:
            self._forget_sent()
            for rank in ranks:
                self._answers.pop((rank, group), None)
                self._send(rank, _QUESTION, _GROUP.pack(group))

    def _awaited(self, operation: Operation) -> list[int]:
        ranks = operation.members.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self._comm.rank]

    def first_asked(self, operation: Operation) -> list[int]:
        """Return the ranks that a waiter asks while it waits: its peers, or its neighbour in the group.

        If a rank is missing for good, then a waiter has a neighbour that is: going back from the missing rank, the
        first one that still runs comes to the operation, or ends too. So a wait costs a message a rank.
        """
        awaited = self._awaited(operation)
        if operation.peers is not None or not awaited:
            return awaited
        ranks = operation.members.ranks
        return [ranks[(ranks.index(self._comm.rank) + 1) % len(ranks)]]

    def exited_ranks(self, operation: Operation) -> list[int]:
        """Return the ranks without which ``operation`` cannot end and whose programs have ended, as far as is known.

        A rank that took part and then ended is not among them. An operation that waits for any of several peers
        (a receive from any source) can end until all of them have gone.
        """
        gone = []
        for rank in self._awaited(operation):
            answer = self._answers.get((rank, operation.members.number))
            if answer is None or not answer.ended:
                continue
            if answer.idle if operation.peers is not None else answer.sequence < operation.number:
                gone.append(rank)
        if operation.peers is not None and len(gone) < len(operation.peers):
            return []
        return gone

    def explain(self, operation: Operation) -> str:
        """Ask all ranks, and return a sentence about the missing ones."""
        awaited, group = self._awaited(operation), operation.members.number
        self.ask(operation, awaited)
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline and not all((rank, group) in self._answers for rank in awaited):
            self.progress()
            time.sleep(0.01)
        found, missing = {}, {}
        for rank in awaited:
            answer = self._answers.get((rank, group))
            if answer is None:
                missing[rank] = "does not answer " + (
                    "(dead, stopped, or its node is out of reach)"
                    if self._watched
                    else "(no rank can while it computes: this MPI library runs without MPI_THREAD_MULTIPLE)"
                )
            elif operation.peers is None and answer.sequence < operation.number:
                missing[rank] = f"has begun {answer.sequence} operations of this group; {answer.doing}"
            else:
                found[rank] = f"answers: {answer.doing}"
        if missing:
            return _listed(missing)
        if operation.peers is not None:
            return _listed(found)
        return f"all ranks have begun it: the network may be down, or one waits elsewhere: {_listed(found)}"


def _listed(states: dict[int, str]) -> str:
    named = [f"rank {rank} {state}" for rank, state in sorted(states.items())[:_MAX_NAMED]]
    return "; ".join([*named, f"and {len(states) - _MAX_NAMED} more ranks"] if len(states) > _MAX_NAMED else named)


_PACKAGE = str(Path(__file__).parents[1])
_OTHERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _stack(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _left_to_threads() -> bool:
    """Return whether the program has ended, but for non-daemon threads that do nothing here.

    The interpreter waits for them before it calls the functions registered with atexit, which may still communicate.
    """
    codes = (frame.f_code for frame in _stack(threading.main_thread()))
    if not any(code.co_name == "_shutdown" and code.co_filename == threading.__file__ for code in codes):
        return False
    workers = [thread for thread in threading.enumerate() if not thread.daemon]
    return not any(frame.f_code.co_filename.startswith(_PACKAGE) for each in workers for frame in _stack(each))


def _doing() -> str:
    """Return the operation in which the program waits, or the line of its own code that it runs."""
    main = threading.main_thread()
    operations = dict(waiting)
    operation = operations.pop(main.ident or 0, None) or next(iter(operations.values()), None)
    if operation is not None:
        return f"it waits in {operation}"
    frames = _stack(main)
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith((_PACKAGE, "<frozen", *_OTHERS))]
    if not frames:
        return "its program is running"
    at = (own or frames)[0]
    return f"its program is at {Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name}"

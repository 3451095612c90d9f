"""Liveness: ranks in long waits ask each other what they do.

A rank answers with its state, in its watchdog's thread or in a wait of its own, such as that at exit. The rank that
asks draws conclusions.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.mpi import processes, requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.world import World

from . import activity
from .calls import last_call
from .picture import State, packed

NO_GROUP = 0
SILENCE_S = 3.0
"""The longest wait for the states of other ranks. Watchdogs look for questions twice a second."""
SETTLED_S = 1.0
"""The shortest wait that counts for a deadlock in a report. Warnings have a limit of their own."""
_TEXT_CHARACTERS = 300
_STACKS_CHARACTERS = 8000
_PROCESS_STATES = {
    "X": "its process has ended",
    "Z": "its process has ended",
    "T": "its process is stopped, by SIGSTOP",
    "t": "its process is stopped, by a debugger",
    "D": "its process waits in the kernel, as for a disk",
    "R": "its process runs and lets no thread of Python answer, as in a long call into C",
}
_HOLDS_PYTHON = "its process sleeps and lets no thread of Python answer, as in a call into C that holds the GIL"
_MAX_RETIRED = 1000
_PAUSE_S = 1e-4
_POLL_S = 0.01
_kept: list[Any] = []
"""Requests that may never complete, with their memory: those of `Liveness.part`, and of messages to other ranks."""


class Tag(enum.IntEnum):
    """Tags of all messages on the communicator: questions (`STATE`, `DUMP`, `STORE`), their answers, and others."""

    STATE = 1
    ANSWER = 2
    ENDING = 3
    RECORDS = 4
    ERROR = 5
    DUMP = 6
    RUN_OVER = 7
    STORE = 8
    LEFT = 9
    BARRIER = 10
    """The tag of a message about a monitored barrier. It has the group, the number of the rank's last barrier and,
    from the group's first rank, the number of the last barrier that all have passed."""


class Liveness:
    """The questions and answers of one process, on a communicator of their own.

    Under MPI_THREAD_MULTIPLE the watchdog's thread answers while the program computes.
    """

    def __init__(self, comm: MPI.Intracomm, world: World, raises: bool) -> None:
        self.comm, self.rank = comm, comm.rank
        self.raises = raises
        """True if errors are raised on all ranks (see `Job.raises`)."""
        self.world = world
        self._watched = world.thread_multiple
        self._lock = threading.RLock()  # it is reentrant, because a handler that `progress` calls may send
        self._answers: dict[tuple[Any, ...], Any] = {}
        """The answers that have come, by rank and by the question: its tag and arguments."""
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._sent_to = np.zeros(comm.size, np.int64)
        self._received = 0
        self._parts = False
        """True while the job ends: messages are received, but not answered."""
        self._links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        self._retired: deque[tuple[int, int]] = deque(maxlen=_MAX_RETIRED)
        self.questions: dict[int, Callable[..., Any]] = {Tag.STATE: self.own_state}
        """For each tag of a question, the function of its arguments that returns the answer."""
        self.handlers: dict[int, Callable[[int, Any], None]] = {Tag.ERROR: self._hear, Tag.BARRIER: self._note_barrier}
        """For each tag, the function that is called with a message's source and content."""
        self.heard: dict[int, Any] = {}
        """For each tag without a function, the content of the last message."""
        self.barriers: dict[tuple[int, int], tuple[int, int]] = {}
        """For each group and rank, the numbers in the last message `Tag.BARRIER` of that rank."""
        self.exited = False
        self.interrupted = False

    def known(self) -> list[Link]:
        """Return the groups that have not ended, also those that are still being made and have no ranks yet."""
        # `values()` would fail if another thread added a group meanwhile.
        return [link for each in self._links.valuerefs() if (link := each()) is not None]

    def links(self) -> list[Link]:
        return [link for link in self.known() if not link.closed]

    def register(self, link: Link) -> None:
        self._links[id(link)] = link

    def find(self, group: int) -> Link | None:
        return next((link for link in self.links() if link.id == group), None)

    def retire(self, link: Link) -> None:
        """Remember a destroyed group for a while, because other ranks may still be in its last operation."""
        self._links.pop(id(link), None)
        for key in tuple(self.barriers):  # a copy, because the watchdog's thread may add keys meanwhile
            if key[0] == link.id:
                del self.barriers[key]
        self._retired.append((link.id, link.sequence))

    def begun(self, group: int) -> int:
        """Return the number of the group's last collective that this rank has begun."""
        link = self.find(group)
        if link is not None:
            return link.sequence
        return next((sequence for number, sequence in reversed(self._retired) if number == group), 0)

    def _forget_sent(self) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]

    def send(self, to: int, tag: int, message: object = None) -> None:
        packed = pickle.dumps(message)
        with self._lock:
            self._sent.append((self.comm.Isend([packed, MPI.BYTE], to, tag), packed))
            self._sent_to[to] += 1

    def tell(self, link: Link, error: DistError) -> None:
        """Let the group's other ranks, which may wait, raise ``error``."""
        for rank in link.others:
            self.send(rank, Tag.ERROR, (link.id, error))

    def _hear(self, _: int, message: tuple[int, DistError]) -> None:
        group, error = message
        link = self.find(group)
        if link is not None:
            link.monitor.be_told(error)

    def _note_barrier(self, source: int, message: tuple[int, int, int]) -> None:
        group, number, passed = message
        self.barriers[group, source] = number, passed

    def leave(self) -> None:
        _kept.append(self._sent)
        with contextlib.suppress(MPI.Exception):  # MPI raises it if a rank has failed
            for rank in self.awaited(None):
                self.send(rank, Tag.LEFT)

    def part(self) -> bool:
        """Receive all that the others have sent, and free the communicator; return False if they do not come."""
        sent, expected = self._sent_to.copy(), np.zeros(1, np.int64)
        deadline, self._parts = time.monotonic() + SILENCE_S, True
        try:
            request = self.comm.Ireduce_scatter_block(sent, expected)
            while True:
                # The clock is read first, because this process may lose its core before the test.
                late = time.monotonic() > deadline
                self.progress()
                if request.Test() and self._received == expected[0] and not self._sent:
                    break
                if Tag.LEFT in self.heard or late:
                    _kept.append((request, sent, expected))
                    return False
                time.sleep(_PAUSE_S)
            self.comm.Free()
        except MPI.Exception:  # a rank may have failed
            return False
        return True

    def progress(self) -> None:
        now = time.monotonic()
        for link in self.links():
            if link.seen[0] != link.sequence:
                link.seen = link.sequence, now
        with self._lock:
            self._forget_sent()
            status = MPI.Status()
            while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, tag = status.Get_source(), status.Get_tag()
                received = bytearray(status.Get_count(MPI.BYTE))
                self.comm.Recv([received, MPI.BYTE], source, tag)
                self._received += 1
                if self._parts and tag != Tag.LEFT:
                    continue
                message = pickle.loads(received)
                if tag in self.questions:
                    self.send(source, Tag.ANSWER, (tag, *message, self.questions[tag](*message)))
                elif tag == Tag.ANSWER:
                    *question, answer = message
                    self._answers[source, *question] = answer
                elif tag in self.handlers:
                    self.handlers[tag](source, message)
                else:
                    self.heard[tag] = message

    def progress_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (found := done()) and time.monotonic() < deadline:
            self.progress()
            time.sleep(_POLL_S)
        return found

    def own_state(self, group: int, stacks: bool = False) -> State:
        state = State(ended=True) if self.exited else _in_program(stacks)
        state = state._replace(begun=self.begun(group), pending=requests.pending > 0, interrupted=self.interrupted)
        link = self.find(group)
        if link is None:
            return state
        idle_s = time.monotonic() - link.seen[1]
        return state._replace(last=last_call(link, self.rank)[:_TEXT_CHARACTERS], idle_s=idle_s)

    def announce_end(self) -> None:
        """Tell rank 0 that this rank reports why the job ends."""
        if self._watched and self.rank != 0:
            with contextlib.suppress(MPI.Exception):
                self.send(0, Tag.ENDING)

    def question(self, ranks: Sequence[int], tag: Tag, *arguments: Any) -> None:
        """Send a question to ranks, which answer by the function in `questions`."""
        with self._lock:
            self._forget_sent()
            for rank in ranks:
                self._answers.pop((rank, tag, *arguments), None)
                self.send(rank, tag, arguments)

    def heard_from(self, ranks: Sequence[int], limit_s: float, tag: Tag, *arguments: Any) -> dict[int, Any]:
        """Wait for the answers to a `question`, and return those that have come, by rank."""
        keys = {rank: (rank, tag, *arguments) for rank in ranks}
        self.progress_until(lambda: all(key in self._answers for key in keys.values()), limit_s)
        told = {rank: self._answers.get(key) for rank, key in keys.items()}
        return {rank: answer for rank, answer in told.items() if answer is not None}

    def ask(self, group: int, ranks: Sequence[int], stacks: bool = False) -> None:
        self.question(ranks, Tag.STATE, group, stacks)

    def answers(self, group: int, ranks: Sequence[int], silence_s: float, stacks: bool = False) -> dict[int, State]:
        """Wait for the answers of ranks that have been asked, and return their states.

        The state of a rank that has not answered tells why it may be silent.
        """
        told = self.heard_from(ranks, silence_s, Tag.STATE, group, stacks)
        return {rank: told.get(rank) or State(silent=self._why_silent(rank, group)) for rank in ranks}

    def answer(self, group: int, rank: int) -> State | None:
        """Return what a rank has answered since it was last asked."""
        return self._answers.get((rank, Tag.STATE, group, False))

    def inquire(
        self, group: int, ranks: Sequence[int], silence_s: float = SILENCE_S, stacks: bool = False
    ) -> dict[int, State]:
        self.ask(group, ranks, stacks)
        return self.answers(group, ranks, silence_s, stacks)

    def awaited(self, operation: Operation | None) -> list[int]:
        """Return the other ranks that take part in an operation; all other ranks if it is None."""
        ranks: Sequence[int] = range(self.comm.size)
        if operation is not None:
            ranks = operation.members.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self.rank]

    def first_asked(self, operation: Operation) -> list[int]:
        """Return the peers of a message, or for a collective the next rank of the group.

        One question of each rank suffices, because the rank before a missing one waits for it, or is missing, too.
        """
        awaited = self.awaited(operation)
        if operation.peers is not None or not awaited:
            return awaited
        ranks = operation.members.ranks
        return [ranks[(ranks.index(self.rank) + 1) % len(ranks)]]

    def exited_ranks(self, operation: Operation) -> list[int]:
        """Return the ranks whose programs have ended without ``operation``.

        For a receive from any source it returns ranks only when the programs of all sources have ended.
        """
        told = {rank: self.answer(operation.members.number, rank) for rank in self.awaited(operation)}
        ended = {rank: each for rank, each in told.items() if each is not None and each.ended}
        if operation.peers is None:
            return [rank for rank, each in ended.items() if each.begun < operation.number]
        gone = [rank for rank, each in ended.items() if not each.pending]
        return gone if len(gone) == len(operation.peers) else []

    def _why_silent(self, rank: int, group: int) -> str:
        """Return the reason why a rank may not answer. For a rank on this host, /proc and shared memory tell more."""
        if not self._watched:
            return "no rank can while it computes: this MPI library runs without MPI_THREAD_MULTIPLE"
        hosts, link = self.world.hosts, self.find(group)
        if hosts[rank] != hosts[self.rank]:
            return "dead, stopped, or its node is out of reach"
        state = _PROCESS_STATES.get(processes.state(self.world.pids[rank]), _HOLDS_PYTHON)
        last = "" if link is None else last_call(link, rank)[:_TEXT_CHARACTERS]
        return f"{state}; its last call here: {last}" if last else state

    def interrupted_before(self) -> bool:
        """Return True if a lower rank is interrupted, too. The lower rank then reports first."""
        answers = ((rank, each) for (rank, tag, *_), each in self._answers.items() if tag == Tag.STATE)
        return any(rank < self.rank and state.interrupted for rank, state in answers)


def group_of(operation: Operation | None) -> int:
    return NO_GROUP if operation is None else operation.members.number


def _in_program(stacks: bool) -> State:
    at, operation = activity.current()
    state = State(at=at[:_TEXT_CHARACTERS], stacks=activity.stacks()[-_STACKS_CHARACTERS:] if stacks else "")
    if operation is None:
        return state
    waited_s = time.monotonic() - operation.start
    state = state._replace(operation=str(operation)[:_TEXT_CHARACTERS], waited_s=waited_s)
    if operation.peers is None:
        members = operation.members
        return state._replace(group=members.number, number=operation.number, ranks=packed(members.ranks))
    # `deadlock` assumes that one of these peers suffices. That is true of a message, but all ranks that make a group
    # wait for each other.
    return state if operation.call.tag is None else state._replace(ranks=packed(operation.peers))

"""Liveness: ranks in long waits ask each other for their progress.

Each answers, from its watchdog thread or its wait at exit, with its activity. The waiter decides.
"""

from __future__ import annotations

import contextlib
import enum
import json
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpiddp.mpi import processes, requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.world import World

from . import activity, deadlock
from .calls import last_call
from .deadlock import Wait

_ASKED, _HEAD = struct.Struct("<q?"), struct.Struct("<qq???")
_NO_GROUP = 0
_MESSAGE = (0, 0)
SILENCE_S = 3.0
"""Time for an answer: watchdogs look twice a second."""
SETTLED_S = 1.0
"""Shortest wait that may be part of a deadlock."""
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
_MAX_NAMED = 8
_MAX_RETIRED = 1000


class Tag(enum.IntEnum):
    """Of all messages on the communicator; `Liveness.handlers` take those that are not its own."""

    QUESTION = 1
    ANSWER = 2
    ENDING = 3
    RECORDS = 4
    MISMATCH = 5
    DUMP = 6
    DUMPED = 7
    RUN_OVER = 8


class State(NamedTuple):
    at: str = ""
    """As in "train.py:120 in backward"."""
    operation: str = ""
    """As in "all_reduce #4 of float32 (8,) in the group of all 4 ranks"."""
    waits: tuple[int, int] = _MESSAGE
    """Group and collective; (0, 0): a message."""
    ranks: Sequence[Sequence[int]] = ()
    """The group's, or the message's peers, as arguments of ranges."""
    waited_s: float = 0.0
    idle_s: float = 0.0
    """Since its last operation of the group began."""
    last: str = ""
    stacks: str = ""

    def text(self) -> str:
        if self.operation:
            return f"it waits in {self.operation}"
        return f"its program is at {self.at}" if self.at else "its program is running"


class Answer(NamedTuple):
    sequence: int
    ended: bool
    idle: bool
    state: State
    interrupted: bool = False

    def text(self) -> str:
        return "its program has ended" if self.ended else self.state.text()

    def text_with_line(self) -> str:
        at = f", at {self.state.at}" if self.state.operation and not self.ended else ""
        return self.text() + at

    def waits_long(self, long_s: float) -> bool:
        return bool(self.state.operation) and not self.ended and self.state.waited_s >= long_s

    def waits_in(self, operation: Operation) -> bool:
        return self.state.waits == (operation.members.number, operation.number)


class Liveness:
    """The questions and answers of one process, on a communicator of their own.

    Watchdogs answer while programs compute, under MPI_THREAD_MULTIPLE.
    """

    def __init__(self, comm: MPI.Intracomm, world: World) -> None:
        self._comm = comm
        self.world = world
        self._watched = world.thread_multiple
        self._lock = threading.RLock()  # a handler may send
        self._answers: dict[tuple[int, int], Answer] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        self._retired: deque[tuple[int, int]] = deque(maxlen=_MAX_RETIRED)
        self._progress: dict[int, tuple[int, float]] = {}
        """By group: operations begun, and since when."""
        self.handlers: dict[int, Callable[[int, bytearray], None]] = {}
        """By tag; called with source and message."""
        self.exited = False
        self.interrupted = False
        self.ending = False
        """Another rank ends the job and reports."""

    @property
    def rank(self) -> int:
        return self._comm.rank

    def links(self) -> list[Link]:
        return list(self._links.values())

    def register(self, link: Link) -> None:
        self._links[link.id] = link
        self._progress[link.id] = link.sequence, time.monotonic()

    def retire(self, link: Link) -> None:
        """Remember a destroyed group for a while: peers may be in its last operation."""
        self._links.pop(link.id, None)
        self._progress.pop(link.id, None)
        self._retired.append((link.id, link.sequence))

    def sequence(self, group: int) -> int:
        link = self._links.get(group)
        if link is not None:
            return link.sequence
        return next((sequence for number, sequence in reversed(self._retired) if number == group), 0)

    def _forget_sent(self) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]

    def send(self, to: int, tag: int, message: bytes) -> None:
        with self._lock:
            self._sent.append((self._comm.Isend([message, MPI.BYTE], to, tag), message))

    def progress(self) -> None:
        now = time.monotonic()
        for group, link in tuple(self._links.items()):
            if self._progress.get(group, (-1, now))[0] != link.sequence:
                self._progress[group] = link.sequence, now
        with self._lock:
            self._forget_sent()
            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, tag = status.Get_source(), status.Get_tag()
                message = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([message, MPI.BYTE], source, tag)
                if tag == Tag.QUESTION:
                    self.send(source, Tag.ANSWER, self._answer(*_ASKED.unpack(message)))
                elif tag == Tag.ENDING:
                    self.ending = True
                elif tag in self.handlers:
                    self.handlers[tag](source, message)
                else:
                    group, sequence, ended, idle, interrupted = _HEAD.unpack_from(message)
                    at, operation, waits, *rest = json.loads(message[_HEAD.size :])
                    state = State(at, operation, tuple(waits), *rest)
                    self._answers[source, group] = Answer(sequence, ended, idle, state, interrupted)

    def _answer(self, group: int, stacks: bool) -> bytes:
        found = self.own_answer(group, stacks)
        head = _HEAD.pack(group, found.sequence, found.ended, found.idle, found.interrupted)
        return head + json.dumps(found.state).encode()

    def own_answer(self, group: int, stacks: bool = False) -> Answer:
        ended = self.exited or activity.left_to_threads()
        state = State() if ended else _state(stacks)
        link, (_, since) = self._links.get(group), self._progress.get(group, (0, time.monotonic()))
        if link is not None:
            state = state._replace(idle_s=time.monotonic() - since, last=last_call(link, self.rank)[:_TEXT_CHARACTERS])
        return Answer(self.sequence(group), ended, requests.pending == 0, state, self.interrupted)

    def announce_end(self) -> None:
        """Tell rank 0 that this rank reports why the job ends."""
        if self._watched and self.rank != 0:
            with contextlib.suppress(MPI.Exception):
                self.send(0, Tag.ENDING, b"")

    def ask(self, group: int, ranks: Sequence[int], stacks: bool = False) -> None:
        with self._lock:
            self._forget_sent()
            for rank in ranks:
                self._answers.pop((rank, group), None)
                self.send(rank, Tag.QUESTION, _ASKED.pack(group, stacks))

    def inquire(
        self, group: int, ranks: Sequence[int], stacks: bool = False, silence_s: float = SILENCE_S
    ) -> dict[int, Answer]:
        self.ask(group, ranks, stacks)
        return self.answers(group, ranks, silence_s, stacks)

    def answers(self, group: int, ranks: Sequence[int], silence_s: float, stacks: bool = False) -> dict[int, Answer]:
        def answered(rank: int) -> bool:
            found = self._answers.get((rank, group))
            # An earlier question's answer, without stacks, may arrive first.
            return found is not None and (found.ended or not stacks or bool(found.state.stacks))

        deadline = time.monotonic() + silence_s
        while time.monotonic() < deadline and not all(map(answered, ranks)):
            self.progress()
            time.sleep(0.01)
        return {rank: self._answers[rank, group] for rank in ranks if (rank, group) in self._answers}

    def awaited(self, operation: Operation | None) -> list[int]:
        """Return the ranks that an operation waits for; None: all others."""
        ranks: Sequence[int] = range(self._comm.size)
        if operation is not None:
            ranks = operation.members.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self.rank]

    def first_asked(self, operation: Operation) -> list[int]:
        """Return the peers of a message, or the neighbour in the group.

        Ranks before a missing one wait or end, too, so that some waiter's neighbour is missing: one message a rank
        suffices.
        """
        awaited = self.awaited(operation)
        if operation.peers is not None or not awaited:
            return awaited
        ranks = operation.members.ranks
        return [ranks[(ranks.index(self._comm.rank) + 1) % len(ranks)]]

    def exited_ranks(self, operation: Operation) -> list[int]:
        """Return the ranks whose programs have ended without ``operation``.

        A receive from any source can end until all sources have gone.
        """
        gone = []
        for rank in self.awaited(operation):
            answer = self._answers.get((rank, operation.members.number))
            if answer is None or not answer.ended:
                continue
            if answer.idle if operation.peers is not None else answer.sequence < operation.number:
                gone.append(rank)
        if operation.peers is not None and len(gone) < len(operation.peers):
            return []
        return gone

    def explain(self, operation: Operation | None, silence_s: float = SILENCE_S) -> str:
        self.ask_about(operation)
        described = self.describe(operation, silence_s)
        circle = self._circle(operation, silence_s)
        if not circle:
            return described
        awaited = {self.rank, *self.awaited(operation)}
        more = {rank: f"answers: {answer.text_with_line()}" for rank, answer in circle.items() if rank not in awaited}
        return "; ".join(filter(None, [deadlock.text(list(circle)), described, _listed(more)]))

    def _circle(self, operation: Operation | None, silence_s: float) -> dict[int, Answer]:
        """Return the ranks of the circle that ``operation`` waits for, in its order; {} if there is none."""
        group = _group(operation)
        known = [each for rank in self.awaited(operation) if (each := self._answers.get((rank, group))) is not None]
        if operation is None or not any(each.state.operation and not each.waits_in(operation) for each in known):
            return {}
        answers = self.inquire(group, self.awaited(None), silence_s=silence_s) | {self.rank: self.own_answer(group)}
        circle = deadlock.reached(self.waits(group, answers, SETTLED_S, silence_s), self.rank)
        return {rank: answers[rank] for rank in circle}

    def waits(
        self, asked: int, answers: dict[int, Answer], long_s: float, silence_s: float = SILENCE_S
    ) -> dict[int, Wait]:
        """Return what the ranks wait for that have waited so long in a collective or a message.

        ``answers`` are those of all ranks, with their progress in the group ``asked``.

        A short wait may end at any moment: circles of such waits are seen wherever ranks pass messages around.
        """
        waits, collectives = {}, dict[tuple[int, int], list[int]]()
        for rank, answer in answers.items():
            state = answer.state
            if answer.waits_long(long_s) and state.waits != _MESSAGE:
                collectives.setdefault(state.waits, []).append(rank)
            elif answer.waits_long(long_s) and state.ranks:
                waits[rank] = Wait(_unpacked(state.ranks), one_suffices=True)
        others = answers.keys() - {self.rank}
        absent = {
            each: _unpacked(answers[ranks[0]].state.ranks).difference(ranks) for each, ranks in collectives.items()
        }
        for (group, _), ranks in absent.items():
            if group != asked:
                self.ask(group, list(ranks & others))
        for (group, number), ranks in absent.items():
            told = answers if group == asked else self.answers(group, list(ranks & others), silence_s)
            begun = {rank: each.sequence for rank, each in told.items()} | {self.rank: self.sequence(group)}
            wait = Wait({rank for rank in ranks if begun.get(rank, 0) < number})
            waits |= dict.fromkeys(collectives[group, number], wait)
        return waits

    def ask_about(self, operation: Operation | None) -> None:
        self.ask(_group(operation), self.awaited(operation))

    def describe(self, operation: Operation | None, silence_s: float) -> str:
        """Describe the ranks that keep ``operation`` from ending; None: all others."""
        awaited = self.awaited(operation)
        answers = self.answers(_group(operation), awaited, silence_s)
        found, missing = {}, {}
        for rank in awaited:
            answer = answers.get(rank)
            if answer is None:
                missing[rank] = f"does not answer ({self.silent(rank, _group(operation))})"
            elif operation is not None and operation.peers is None and answer.sequence < operation.number:
                missing[rank] = f"has begun {answer.sequence} operations of this group; {answer.text_with_line()}"
            else:
                found[rank] = f"answers: {answer.text_with_line()}"
        if operation is None:
            return _listed(found | missing)
        if missing:
            return _listed(missing)
        if operation.peers is not None:
            return _listed(found)
        return f"all ranks have begun it: the network may be down, or one waits elsewhere: {_listed(found)}"

    def silent(self, rank: int, group: int) -> str:
        """Return why a rank may not answer: of a process on this host, as far as the system and shared memory tell."""
        if not self._watched:
            return "no rank can while it computes: this MPI library runs without MPI_THREAD_MULTIPLE"
        hosts, link = self.world.hosts, self._links.get(group)
        if hosts[rank] != hosts[self.rank]:
            return "dead, stopped, or its node is out of reach"
        state = _PROCESS_STATES.get(processes.state(self.world.pids[rank]), _HOLDS_PYTHON)
        last = "" if link is None else last_call(link, rank)[:_TEXT_CHARACTERS]
        return f"{state}; its last call here: {last}" if last else state

    def tell(self, ranks: Sequence[int], silence_s: float) -> str:
        answers = self.inquire(_NO_GROUP, ranks, silence_s=silence_s)
        return _listed({rank: f"answers: {answer.text_with_line()}" for rank, answer in answers.items()})

    def interrupted_before(self) -> bool:
        """Return True if a lower rank is interrupted, too: it reports."""
        return any(rank < self.rank and answer.interrupted for (rank, _), answer in self._answers.items())


def _group(operation: Operation | None) -> int:
    return _NO_GROUP if operation is None else operation.members.number


def _listed(states: dict[int, str]) -> str:
    named = [f"rank {rank} {state}" for rank, state in sorted(states.items())[:_MAX_NAMED]]
    return "; ".join([*named, f"and {len(states) - _MAX_NAMED} more ranks"] if len(states) > _MAX_NAMED else named)


def _state(stacks: bool) -> State:
    at, operation, waited_s = activity.current()
    state = State(at=at[:_TEXT_CHARACTERS], stacks=activity.stacks()[-_STACKS_CHARACTERS:] if stacks else "")
    if operation is None:
        return state
    state = state._replace(operation=str(operation)[:_TEXT_CHARACTERS], waited_s=waited_s)
    if operation.peers is None:
        return state._replace(
            waits=(operation.members.number, operation.number), ranks=_packed(operation.members.ranks)
        )
    # Only of a message is it known whether one peer suffices.
    return state if operation.tag is None else state._replace(ranks=_packed(operation.peers))


def _packed(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return a progression as one triple: the answers of 10,000 ranks are to be short."""
    step = max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1
    whole = range(ranks[0], ranks[-1] + 1, step) if ranks else range(0)
    if tuple(whole) == tuple(ranks):
        return [(whole.start, whole.stop, whole.step)]
    return [(rank, rank + 1, 1) for rank in ranks]


def _unpacked(ranks: Sequence[Sequence[int]]) -> set[int]:
    return {rank for each in ranks for rank in range(*each)}

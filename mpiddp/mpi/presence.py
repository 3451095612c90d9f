"""Who is still there: ranks ask each other, when they have waited long, how far the others have come.

Nothing is sent while all goes well. A rank that has waited for seconds inside an operation asks the ranks that it
waits for; each answers from its watchdog thread (also while its program computes) or from its wait at exit (after its
program has ended) with how many operations of that group it has begun, and whether its program has ended. So the
decision that somebody is missing is the waiter's, and a rank that is merely done early harms nobody.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np

from .library import MPI
from .operation import Operation

_QUESTION, _ANSWER = 1, 2
# After this many seconds without an answer a rank counts as silent: watchdogs look twice a second.
SILENCE_S = 3.0


class Answer(NamedTuple):
    """How far a rank has come in a group."""

    sequence: int
    left: bool


class Presence:
    """The questions and answers of one process, on a communicator of their own.

    Parameters
    ----------
    comm : MPI.Intracomm
        A duplicate of the world; freed with the process.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._sent: list[tuple[MPI.Request, object]] = []
        self.sequences: dict[int, int] = {}
        """Operations begun, by group; kept when a group is destroyed, because peers may still be in its last one."""
        self.left = False
        """Whether this rank's program has ended, so that it will begin no operation any more."""

    def _send(self, to: int, tag: int, *numbers: int) -> None:
        message = np.array(numbers, dtype=np.int64)
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent.append((self._comm.Isend(message, to, tag), message))

    def pump(self) -> None:
        """Answer the questions and note the answers that have arrived."""
        with self._lock:
            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, numbers = status.Get_source(), np.zeros(3, dtype=np.int64)
                self._comm.Recv(numbers, source, status.Get_tag())
                if status.Get_tag() == _QUESTION:
                    group = int(numbers[0])
                    left = self.left or not threading.main_thread().is_alive()
                    self._send(source, _ANSWER, group, self.sequences.get(group, 0), left)
                else:
                    self._answers[source, int(numbers[0])] = Answer(int(numbers[1]), bool(numbers[2]))

    def ask(self, operation: Operation) -> None:
        """Ask everybody whom ``operation`` waits for how far they have come."""
        with self._lock:
            for rank in self._awaited(operation):
                self._answers.pop((rank, operation.link.id), None)
                self._send(rank, _QUESTION, operation.link.id, 0, 0)

    def _awaited(self, operation: Operation) -> list[int]:
        ranks = operation.link.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self._comm.rank]

    def missing(self, operation: Operation) -> dict[int, str]:
        """Return the ranks that have not come to ``operation``, each with what is known of it."""
        found = {}
        for rank in self._awaited(operation):
            answer = self._answers.get((rank, operation.link.id))
            if answer is None:
                found[rank] = "does not answer (dead, stopped, or its node is out of reach)"
            elif operation.peers is None and answer.sequence < operation.link.sequence:
                state = "its program has ended" if answer.left else "its program is elsewhere"
                found[rank] = f"has begun {answer.sequence} operations of this group; {state}"
            elif operation.peers is not None:
                found[rank] = "its program has ended" if answer.left else "its program is running"
        return found

    def departed(self, operation: Operation) -> list[int]:
        """Return the ranks without which ``operation`` cannot end and whose programs have ended.

        A rank that took part and then ended is not among them. An operation that waits for any of several peers
        (a receive from any source) can end until all of them have gone.
        """
        gone = []
        for rank in self._awaited(operation):
            answer = self._answers.get((rank, operation.link.id))
            took_part = operation.peers is None and answer is not None and answer.sequence >= operation.link.sequence
            if answer is not None and answer.left and not took_part:
                gone.append(rank)
        if operation.peers is not None and len(gone) < len(operation.peers):
            return []
        return gone

    def explain(self, operation: Operation) -> str:
        """Ask, wait a little for answers, and return a sentence about the ranks that are missing."""
        self.ask(operation)
        deadline = time.monotonic() + SILENCE_S
        awaited = self._awaited(operation)
        while time.monotonic() < deadline:
            self.pump()
            if all((rank, operation.link.id) in self._answers for rank in awaited):
                break
            time.sleep(0.01)
        missing = self.missing(operation)
        if not missing:
            return "all ranks of the group have begun it: the network may be down, or a rank waits elsewhere"
        return "; ".join(f"rank {rank} {what}" for rank, what in sorted(missing.items()))

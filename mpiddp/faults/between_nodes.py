"""Comparison of calls between nodes, in the background: a mismatch is found within seconds.

Twice a second the watchdog of each node's first rank sends its last records to the group's next node, which compares
them when it has made as many calls. The finder tells all ranks of the group. Jobs that outrun this have their calls
compared by the next handshake, or by the end of the job: one sum tells whether any differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.typing import Array

from .calls import RECORD, Calls, difference, first_difference
from .liveness import Liveness, Tag, alive


class BetweenNodes:
    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._groups: weakref.WeakValueDictionary[int, Comparison] = weakref.WeakValueDictionary()
        liveness.handlers[Tag.RECORDS] = self._receive

    def watch(self, link: Link, calls: Calls, report: Callable[[MismatchError], None]) -> Comparison | None:
        """Compare a group's calls until the result is dropped; ``report`` runs in the watchdog's thread."""
        if link.one_node:
            return None
        found = self._groups[link.id] = Comparison(link, calls, report)
        return found

    def look(self) -> None:
        for group, each in alive(self._groups):
            records = each.news()
            if records is not None:
                self._liveness.send(each.successor, Tag.RECORDS, (group, records.tobytes()))  # for any NumPy
            error = each.compare()
            if error is not None:
                each.report(error)

    def begin_end(self, comm: MPI.Intracomm) -> tuple[MPI.Request, Array]:
        """Begin the last barrier of all ranks; its sum is 0 if the calls of every group agree."""
        shares = [each.share(group) for group, each in self._groups.items()]
        total = np.array([sum(shares) % (1 << 64)], np.uint64)
        return comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM), total

    def settle(self, comm: MPI.Intracomm) -> MismatchError | None:
        """Return the error, equal on all ranks, of the first group whose calls differ; collective."""
        mine = {group: each.history() for group, each in self._groups.items()}
        told = comm.allgather(mine)
        seen: dict[int, set[int]] = {}
        for group, history in (item for each in told for item in each.items()):
            seen.setdefault(group, set()).add(history)
        odd = min((group for group, histories in seen.items() if len(histories) > 1), default=None)
        if odd is None:
            return None
        records = comm.allgather(self._groups[odd].last() if odd in mine else None)
        found = [each for each in records if each is not None]
        names, ranks, recent = zip(*found, strict=True)
        return first_difference(names[0], ranks, recent, ended=True)

    def _receive(self, source: int, message: tuple[int, bytes]) -> None:
        group, records = message
        each = self._groups.get(group)
        if each is not None:
            each.take(source, np.frombuffer(records, RECORD))


class Comparison:
    def __init__(self, link: Link, calls: Calls, report: Callable[[MismatchError], None]) -> None:
        firsts = [int(link.by_node[start]) for start in link.node_starts]
        self.successor, self._weight = -1, 0
        """The first rank of the next node; -1 on a rank that is not the first of its own."""
        if link.rank in firsts:
            self._weight = len(firsts) - 1 if link.rank == firsts[0] else -1
            self.successor = link.ranks[firsts[(firsts.index(link.rank) + 1) % len(firsts)]]
        self.report = report
        self._name, self._rank = str(link), link.ranks[link.rank]
        self._calls = calls
        self._sent = self._compared = 0
        self._found = False
        self._theirs: tuple[int, Array] | None = None

    def history(self) -> int:
        return self._calls.link.history

    def share(self, group: int) -> int:
        """Return this rank's part of a sum over the nodes, which is 0 if their histories are equal."""
        return self._weight * hash((group, self.history()))

    def last(self) -> tuple[str, int, Array]:
        return self._name, self._rank, self._calls.recent()

    def news(self) -> Array | None:
        if self.successor < 0 or self._calls.latest == self._sent:
            return None
        self._sent = self._calls.latest
        return self._calls.recent()

    def take(self, source: int, records: Array) -> None:
        self._theirs, self._compared = (source, records), 0

    def compare(self) -> MismatchError | None:
        """Return the error of nodes that disagree, but only once."""
        if self._theirs is None or self._found or self._compared == self._calls.latest:
            return None
        self._compared = self._calls.latest
        source, theirs = self._theirs
        error = difference(self._name, (self._rank, source), (self._calls.recent(), theirs))
        self._found = error is not None
        return error

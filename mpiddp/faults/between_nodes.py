"""Comparison of calls between nodes, in the background: a mismatch is found within seconds.

Twice a second, the watchdog of a group's first rank on each node sends that rank's last records to the group's first
rank on the next node, which compares the calls that both ranks have made. A rank that finds a mismatch tells all ranks
of the group. If a job makes calls fast, it overwrites some records before they are sent. Calls are also hashed, and the
next handshake compares the hashes, or the end of the job does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.mpi.link import Link, Resource
from mpiddp.typing import Array

from .calls import RECORD, Calls, difference, first_difference
from .liveness import Liveness, Tag


class BetweenNodes:
    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        liveness.handlers[Tag.RECORDS] = self._receive

    def _groups(self) -> dict[int, Comparison]:
        found = ((link.id, link.find(Comparison)) for link in self._liveness.links())
        return {group: each for group, each in found if each is not None}

    def look(self) -> None:
        for group, each in self._groups().items():
            latest = each.calls.latest
            if each.successor >= 0 and latest != each.sent:
                each.sent = latest
                records = each.calls.recent().tobytes()  # bytes, because other NumPys may pickle arrays differently
                self._liveness.send(each.successor, Tag.RECORDS, (group, records))
            error = each.compare()
            if error is not None:
                each.report(error)

    def settle(self) -> MismatchError | None:
        """Return the error, equal on all ranks, of the first group whose calls differ; collective."""
        comm, groups = self._liveness.world.comm, self._groups()
        if len(set(self._liveness.world.nodes)) == 1:
            return None
        mine = {group: each.calls.link.history for group, each in groups.items()}
        seen = defaultdict[int, set[int]](set)
        for group, history in (item for each in comm.allgather(mine) for item in each.items()):
            seen[group].add(history)
        odd = min((group for group, histories in seen.items() if len(histories) > 1), default=None)
        if odd is None:
            return None
        own = groups.get(odd)
        told = comm.allgather(None if own is None else (own.name, own.rank, own.calls.recent()))
        names, ranks, recent = zip(*filter(None, told), strict=True)
        return first_difference(names[0], ranks, recent, ended=True)

    def _receive(self, source: int, message: tuple[int, bytes]) -> None:
        group, records = message
        each = self._groups().get(group)
        if each is not None:
            each.theirs, each.compared = (source, np.frombuffer(records, RECORD)), 0


class Comparison(Resource):
    """The comparison of a group's calls; ``report`` runs in the watchdog's thread."""

    def __init__(self, link: Link, calls: Calls, report: Callable[[MismatchError], None]) -> None:
        firsts = [int(link.by_node[start]) for start in link.node_starts]
        self.successor = -1
        """The first rank of the next node; -1 on a rank that is not the first of its own."""
        if link.rank in firsts:
            self.successor = link.ranks[firsts[(firsts.index(link.rank) + 1) % len(firsts)]]
        self.report = report
        self.name, self.rank = str(link), link.ranks[link.rank]
        self.calls = calls
        self.sent = self.compared = 0
        """The numbers of the last calls that were sent to the successor, and compared with those of ``theirs``."""
        self.theirs: tuple[int, Array] | None = None
        """The rank whose records have come last, and these records; None before any have come."""
        self._found = False

    def compare(self) -> MismatchError | None:
        """Return the error of nodes that disagree, but only once."""
        if self.theirs is None or self._found or self.compared == self.calls.latest:
            return None
        self.compared = self.calls.latest
        source, theirs = self.theirs
        error = difference(self.name, (self.rank, source), (self.calls.recent(), theirs))
        self._found = error is not None
        return error

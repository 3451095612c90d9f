"""One picture of a job: the state of each rank, and its text, in which equal ranks share a line.

Live ranks tell their states (`liveness`). After the end of a job, its dumps do (`flight`). The lines of the fewest
ranks come first, because a bug mostly shows on few ranks. The module imports the standard library only, so that dumps
can be read without MPI.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from mpiddp.mpi.operation import Operation
    from mpiddp.mpi.world import World

T = TypeVar("T")

_MAX_RANGES, _MAX_ROWS, _MAX_LINES = 6, 5, 3
_UNKNOWN = -1.0

Cell: TypeAlias = tuple[str, str]
"""The line that a rank's program is at, and a text on what the rank does at this line."""


class Hosts(NamedTuple):
    """Hosts and processes of a job that has ended, by rank. `World` has the same attributes for a job that runs."""

    hosts: Mapping[int, str]
    pids: Mapping[int, int]
    outer: Sequence[int] = ()


class State(NamedTuple):
    """The state of one rank: its line or its wait, and its progress in the group that it was asked about."""

    at: str = ""
    """The program's line, as in "train.py:120 in backward"."""
    operation: str = ""
    """The operation in which the rank waits, as in "all_reduce #4 of float32 (8,) in the group of all 4 ranks"."""
    group: int = 0
    """The group of the collective in which the rank waits; 0 if it waits for something else, or does not wait."""
    number: int = 0
    ranks: Sequence[int] = ()
    """The ranks of ``group``, or the peers of the message that the rank waits for, as `packed` returns them."""
    waited_s: float = 0.0
    begun: int = 0
    """The number of the last collective that the rank has begun in the group that it was asked about."""
    last: str = ""
    """The text of the last collective that the rank has begun in that group."""
    idle_s: float = _UNKNOWN
    """The seconds since the rank began its last collective."""
    ended: bool = False
    pending: bool = False
    """True if the rank has asynchronous operations that have not ended."""
    interrupted: bool = False
    stacks: str = ""
    silent: str = ""
    """The reason why the rank may not have answered. If there is one, all other fields are unknown."""

    def waits_long(self, long_s: float) -> bool:
        return bool(self.operation) and self.waited_s >= long_s

    def waits_in(self, operation: Operation) -> bool:
        return operation.peers is None and (self.group, self.number) == (operation.members.number, operation.number)

    def is_in(self, operation: Operation) -> bool:
        """Return True if ``operation`` is a collective that the rank has begun."""
        return operation.peers is None and (self.waits_in(operation) or self.begun >= operation.number)

    def text(self, idle_s: float) -> str:
        if self.silent:
            return f"no answer: {self.silent}"
        if self.ended:
            return "the program has ended"
        if self.operation:
            return f"in {self.operation}"
        if idle_s == _UNKNOWN:
            return "in its own code"
        last = f" ({self.last})" if self.last else ""
        what = f"its last call{last}" if self.begun else "the group was made, no call yet"
        return f"{duration(idle_s)} since {what}"


def packed(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, and others as they are, so that answers about 10,000 ranks stay short."""
    step = max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1
    whole = range(ranks[0], ranks[-1] + 1, step) if ranks else range(0)
    return whole if tuple(whole) == tuple(ranks) else ranks


def cells(states: Mapping[int, State]) -> dict[int, Cell]:
    """Return each rank's line and text. Ranks that idle since the same call get equal texts, with the longest time."""
    idle: dict[str, float] = {}
    for state in states.values():
        idle[state.last] = max(idle.get(state.last, _UNKNOWN), state.idle_s)
    return {rank: (state.at, state.text(idle[state.last])) for rank, state in states.items()}


def about(hosts: World | Hosts, operation: Operation | None, rank: int, states: Mapping[int, State]) -> list[str]:
    """Return lines about the ranks that keep ``operation``, in which ``rank`` waits, from ending.

    If ``operation`` is None, the lines are about all other ranks.
    """
    others = {each: state for each, state in states.items() if each != rank}
    missing = others if operation is None else {each: x for each, x in others.items() if not x.is_in(operation)}
    lines = rows(hosts, cells(missing))
    if operation is None or operation.peers is not None:
        return ["  it waits for:", *lines] if lines and operation is not None else lines
    waiting = {each: x.at for each, x in states.items() if each == rank or x.waits_in(operation)}
    after = {each: x for each, x in others.items() if each not in missing and each not in waiting}
    if missing:
        head = f"{counted(len(missing))} {'is' if len(missing) == 1 else 'are'} NOT in it:"
    elif after:  # the answers come some time after the time limit
        head = f"no rank is missing by now: rank{'s' * (len(after) > 1)} {ranges(after)} may have begun it too late"
    else:
        head = "all ranks are in it: the network may be down, or one of them waits elsewhere"
    begun = named_lines({each: "its end" if x.ended else x.at for each, x in after.items()})
    went_on = [f"  {counted(len(after))} began it and went on: {begun}"] if after else []
    waits = f"  {counted(len(waiting))} {'waits' if len(waiting) == 1 else 'wait'} in it at {named_lines(waiting)}"
    return [f"  {head}", *lines, *went_on, waits]


def fewest_first(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Return the different values with their ranks, those of the fewest ranks first."""
    ranks: dict[T, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))


def rows(hosts: World | Hosts, cells: Mapping[int, Cell], limit: int | None = _MAX_ROWS) -> list[str]:
    """Return a line for each set of ranks that do the same at the same program line.

    The activity of the fewest ranks comes first, and of sets with the same activity the smallest. If there are more
    than ``limit`` sets, one line counts the rest.
    """
    common = Counter(text for _, text in cells.values())
    found = sorted(fewest_first(cells), key=lambda item: common[item[0][1]])
    shown = [f"    {who(hosts, ranks):<30}  {at:<30}  {text}".rstrip() for (at, text), ranks in found[:limit]]
    if len(found) > len(shown):
        rest = sum(len(ranks) for _, ranks in found[len(shown) :])
        shown.append(f"    and {counted(rest)} in {len(found) - len(shown)} other states")
    return shown


def named_lines(lines: Mapping[int, str]) -> str:
    """Return the program's lines with their ranks, those of the fewest ranks first."""
    found = fewest_first(lines)
    named = [f"{at or 'an unknown line'} ({ranges(ranks)})" for at, ranks in found[:_MAX_LINES]]
    rest = [f"and {len(found) - _MAX_LINES} other lines"] if len(found) > _MAX_LINES else []
    return "; ".join([*named, *rest])


def who(hosts: World | Hosts, ranks: Sequence[int]) -> str:
    names = sorted({hosts.hosts[rank] for rank in ranks})
    outer = f"{ranges(hosts.outer[rank] for rank in ranks)} of the world, " if hosts.outer else ""
    where = f"node {names[0]}" if len(names) == 1 else f"{len(names)} nodes"
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({outer}{where}, pid {hosts.pids[ranks[0]]})"
    return f"ranks {ranges(ranks)} ({outer}{where})"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def counted(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def spans(numbers: Iterable[int]) -> list[tuple[str, int]]:
    """Return runs of consecutive numbers, as in "0-16" and "18", each with how many it has."""
    grouped = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in grouped]
    return [(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}", len(run)) for run in runs]


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges, as in "0-16, 18, 40-511"; of many ranges, the first ones.

    Examples
    --------
    >>> ranges([3, 1, 2, 7])
    '1-3, 7'
    """
    found = spans(ranks)
    more = sum(count for _, count in found[_MAX_RANGES:])
    return ", ".join(text for text, _ in found[:_MAX_RANGES]) + (f" and {more} more" if more else "")

"""Deadlocks: circles of ranks that wait for each other.

A rank in a collective waits for all ranks that have not begun it; a receive from any source waits for one of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from .liveness import SILENCE_S, Liveness
from .picture import State, fewest_first

MAX_NAMED = 8


@dataclass(eq=False)
class Wait:
    """The ranks that one operation waits for. All ranks that wait in the operation share one object."""

    ranks: Set[int]
    one_suffices: bool = False

    def can_end(self, stuck: Mapping[int, Wait]) -> bool:
        enough = any if self.one_suffices else all
        return not self.ranks or enough(rank not in stuck for rank in self.ranks)


def waits(
    liveness: Liveness, asked: int, states: Mapping[int, State], long_s: float, silence_s: float = SILENCE_S
) -> dict[int, Wait]:
    """Return the waits of the ranks that have waited for ``long_s`` in a collective or a message.

    Shorter waits do not count, because they form circles wherever ranks pass messages around, and end. ``states`` are
    those of all ranks, with their progress in the group ``asked``; about other groups the ranks are asked now.
    """
    long = {rank: state for rank, state in states.items() if state.waits_long(long_s) and state.ranks}
    waits = {rank: Wait(set(state.ranks), one_suffices=True) for rank, state in long.items() if not state.group}
    calls = {rank: (state.group, state.number) for rank, state in long.items() if state.group}
    collectives = dict(fewest_first(calls))
    absent = {each: set(states[ranks[0]].ranks).difference(ranks) for each, ranks in collectives.items()}
    others = states.keys() - {liveness.rank}
    for (group, _), ranks in absent.items():
        if group != asked:
            liveness.ask(group, list(ranks & others))
    for (group, number), ranks in absent.items():
        told = states if group == asked else liveness.answers(group, list(ranks & others), silence_s)
        begun = {rank: each.begun for rank, each in told.items()} | {liveness.rank: liveness.begun(group)}
        wait = Wait({rank for rank in ranks if begun.get(rank, 0) < number})
        waits |= dict.fromkeys(collectives[group, number], wait)
    return waits


def circle_of_each(waits: Mapping[int, Wait]) -> dict[int, list[int]]:
    """Return, for each rank that can never go on, the circle for which it waits, directly or not."""
    following, found = _following(waits), dict[int, list[int]]()
    for rank in following:
        path = dict[int, None]()
        while rank not in found and rank not in path:
            path[rank] = None
            rank = following[rank]
        circle = found.get(rank) or _closed(list(path), rank)
        found |= dict.fromkeys(path, circle)
    return found


def circles(waits: Mapping[int, Wait]) -> list[list[int]]:
    """Return the circles that waiting ranks form, each from its lowest rank on."""
    return [circle for rank, circle in sorted(circle_of_each(waits).items()) if rank == circle[0]]


def _closed(path: list[int], rank: int) -> list[int]:
    circle = path[path.index(rank) :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]


def _following(waits: Mapping[int, Wait]) -> dict[int, int]:
    """Return, for each rank that can never go on, the lowest such rank that it waits for.

    The choice of the lowest lets every rank that knows the same waits find the same circles. From each rank these
    choices lead to one of the circles.
    """
    left, before = dict(waits), -1
    while len(left) != before:
        before = len(left)
        for rank, wait in tuple(left.items()):
            if wait.can_end(left):
                del left[rank]
        # A chain of messages takes one pass if the ranks come in its order, and many in the opposite order. So passes
        # alternate in direction.
        left = dict(reversed(left.items()))
    lowest = {wait: min(left.keys() & wait.ranks) for wait in set(left.values())}
    return {rank: lowest[wait] for rank, wait in left.items()}


def text(circle: list[int]) -> str:
    """Return e.g. "rank 0 waits for rank 1, which waits for rank 0: a deadlock"."""
    named = [f"rank {rank}" for rank in circle[1:MAX_NAMED]]
    if len(circle) > MAX_NAMED:
        named.append(f"{len(circle) - MAX_NAMED} more ranks")
    last = f"rank {circle[0]}" if len(circle) > 1 else "itself"
    return f"rank {circle[0]} waits for {', which waits for '.join([*named, last])}: a deadlock"

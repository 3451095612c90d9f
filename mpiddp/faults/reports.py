"""Reports on a job that runs: who keeps an operation from ending, and what all ranks do.

Each report asks ranks for their states and makes one picture of them. One rank warns for all: every rank that waits
asks the rank before it, and only a rank whose predecessor does not wait asks all. A rank does not warn if all ranks
that it waits for wait themselves. If these form a circle, one of them reports the deadlock.
"""

from collections.abc import Callable, Mapping, Sequence

from mpiddp.mpi.operation import Operation

from . import deadlock, picture
from .liveness import SETTLED_S, SILENCE_S, Liveness, group_of
from .picture import State, counted, duration

_Ask = Callable[[Sequence[int]], Mapping[int, State]]


class Reports:
    """The reports of one process.

    ``collect(reason)`` lets all ranks write their flight recorders, and returns a line that names the files, or "".
    """

    def __init__(self, liveness: Liveness, collect: Callable[[str], str]) -> None:
        self.liveness, self.collect = liveness, collect

    def explain(self, operation: Operation | None, silence_s: float = SILENCE_S) -> str:
        """Return a colon, and lines about the ranks that ``operation`` waits for; if it is None, about all others."""
        self.ask(operation)
        lines = self.answers(operation, silence_s)
        circle, text = self._circle(operation, silence_s) if operation else ([], "")
        if self.liveness.rank in circle:
            return f": {text}"
        return f": {text}\n{lines}" if circle else f":\n{lines}" if lines else ""

    def ask(self, operation: Operation | None) -> None:
        self.liveness.ask(group_of(operation), self.liveness.awaited(operation))

    def answers(self, operation: Operation | None, silence_s: float) -> str:
        """Return lines about the ranks that `ask` has asked."""
        liveness, group, rank = self.liveness, group_of(operation), self.liveness.rank
        states = liveness.answers(group, liveness.awaited(operation), silence_s) | {rank: liveness.own_state(group)}
        return "\n".join(picture.about(liveness.world, operation, rank, states))

    def _circle(self, operation: Operation, silence_s: float) -> tuple[list[int], str]:
        """Return the circle that ``operation`` waits for, directly or not, and its text."""
        liveness, group, rank = self.liveness, operation.members.number, self.liveness.rank
        known = liveness.answers(group, liveness.awaited(operation), 0)
        if not any(each.operation and not each.waits_in(operation) for each in known.values()):
            return [], ""
        states = liveness.inquire(group, liveness.awaited(None), silence_s) | {rank: liveness.own_state(group)}
        waits = deadlock.waits(liveness, group, states, SETTLED_S, silence_s)
        circle = deadlock.circle_of_each(waits).get(rank, [])
        return circle, _deadlock(liveness, circle, states) if circle else ""

    def doing(self, ranks: Sequence[int], silence_s: float) -> str:
        states = self.liveness.inquire(group_of(None), ranks, silence_s)
        return "\n".join(picture.rows(self.liveness.world, picture.cells(states)))

    def survey(self, group: int) -> str:
        """Return the states and stacks of all ranks, equal ones together.

        All ranks that answer also write their flight recorders.
        """
        liveness, world = self.liveness, self.liveness.world
        states = liveness.inquire(group, liveness.awaited(None), stacks=True)
        states[world.rank] = liveness.own_state(group, stacks=True)
        circles = deadlock.circles(deadlock.waits(liveness, group, states, SETTLED_S))
        lines = [f"mpiddp: job {world.job}, {counted(world.size)}", *(f"  {deadlock.text(each)}" for each in circles)]
        lines += picture.rows(world, picture.cells(states), limit=None)
        for stacks, ranks in picture.fewest_first({rank: each.stacks.rstrip() for rank, each in states.items()}):
            lines += [f"  {picture.who(world, ranks)}: stacks\n{stacks}"] if stacks else []
        return "\n".join(filter(None, [*lines, self.collect("a question")]))

    def warning(self, operation: Operation, waited_s: float, next_s: float, long_s: float) -> str:
        """Return the warning of a wait; "" if this rank has nothing to print, as when another rank reports.

        ``next_s`` is the time until the next warning. A rank that has waited for ``long_s`` is left to report itself.
        """
        liveness, group = self.liveness, operation.members.number
        states = {liveness.rank: liveness.own_state(group)}

        def ask(ranks: Sequence[int]) -> dict[int, State]:
            unknown = [rank for rank in ranks if rank not in states]
            states.update(liveness.inquire(group, unknown) if unknown else {})
            return states

        limit, where = operation.members.timeout_s, "Stacks of all ranks: python -m mpiddp where"
        end = f"  next warning in {duration(next_s)}, error at {duration(limit)}. {where}"
        reports = [f"{operation}\n{lines}" for lines in [_missing(liveness, operation, ask, long_s)] if lines]
        reports += _deadlocks(liveness, operation, ask, long_s)
        return "\n".join(f"mpiddp: {duration(waited_s)} without progress.  {each}\n{end}" for each in reports)


def _missing(liveness: Liveness, operation: Operation, ask: _Ask, long_s: float) -> str:
    """Return lines about the ranks that keep the operation from ending.

    Return "" if another rank reports, or if all ranks that this one waits for wait themselves.
    """
    ranks, awaited, me = operation.members.ranks, liveness.awaited(operation), liveness.rank
    index = ranks.index(me)
    if not awaited:
        return ""  # the operation waits for this rank only
    if operation.peers is None and index and ask(ranks[index - 1 : index])[ranks[index - 1]].waits_in(operation):
        return ""
    states = {rank: told[rank] for told in [ask(awaited)] for rank in (me, *awaited)}
    if operation.peers is None:
        if any(states[rank].waits_in(operation) for rank in ranks[:index]):
            return ""
    elif operation.call.tag is None and any(states[rank].waits_long(long_s) for rank in awaited if rank < me):
        return ""  # the ranks that make a group all wait for each other, and the lowest one reports
    blocking = [rank for rank in awaited if not states[rank].is_in(operation)]
    if blocking and all(states[rank].waits_long(long_s) for rank in blocking):
        return ""
    return "\n".join(picture.about(liveness.world, operation, me, states))


def _deadlocks(liveness: Liveness, operation: Operation, ask: _Ask, long_s: float) -> list[str]:
    """Return the circles that this rank reports.

    A circle's lowest rank reports it. If ranks right before the lowest one wait, too, the first of these reports it, so
    that few ranks have to ask all.
    """
    me = liveness.rank
    if me and ask([me - 1])[me - 1].waits_long(long_s):
        return []
    states = ask(liveness.world.ranks)
    reports = []
    for circle in deadlock.circles(deadlock.waits(liveness, operation.members.number, states, long_s)):
        reporter = circle[0]
        while reporter and states[reporter - 1].waits_long(long_s):
            reporter -= 1
        if reporter == me:
            reports.append(_deadlock(liveness, circle, states))
    return reports


def _deadlock(liveness: Liveness, circle: list[int], states: Mapping[int, State]) -> str:
    world, found = liveness.world, picture.cells({rank: states[rank] for rank in circle})
    lines = [line for rank in circle[: deadlock.MAX_NAMED] for line in picture.rows(world, {rank: found[rank]})]
    return "\n".join([deadlock.text(circle), *lines])

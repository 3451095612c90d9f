"""Reports of stalls: the ranks that keep an operation from ending, grouped by their activity.

One rank prints for all: every waiter asks the rank before it, and only one whose predecessor does not wait asks all. A
waiter leaves the report to ranks that it waits for and that wait, too; where they form a circle, one rank reports that.
The fewest ranks come first: a bug mostly sits on few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpiddp.mpi.operation import Operation
from mpiddp.mpi.world import World

from . import deadlock
from .lineup import counted, places, ranges
from .liveness import SETTLED_S, Answer, Liveness

_MAX_ROWS, _MAX_CIRCLE = 5, 8


def warning(liveness: Liveness, operation: Operation, at: str, waited_s: float, next_s: float, long_s: float) -> str:
    """Return the warning; "" where another rank prints it.

    ``at`` is the waiting line, ``next_s`` the time until the next warning. A rank that has waited for ``long_s`` is
    left to report itself.
    """
    known, asked = dict[int, Answer](), {liveness.rank}

    def ask(ranks: Sequence[int]) -> dict[int, Answer]:
        unknown = [rank for rank in ranks if rank not in asked]
        asked.update(unknown)
        known.update(liveness.inquire(operation.members.number, unknown) if unknown else {})
        return known

    limit = operation.members.timeout_s
    end = (
        f"  next warning in {_duration(next_s)}, error at {_duration(limit)}."
        " Stacks of all ranks: python -m mpiddp where"
    )
    reports = [f"{operation}\n{rows}" for rows in [_missing(liveness, operation, at, ask, long_s)] if rows]
    reports += _deadlocks(liveness, operation, ask, long_s)
    return "\n".join(f"mpiddp: {_duration(waited_s)} without progress.  {each}\n{end}" for each in reports)


_Ask = Callable[[Sequence[int]], dict[int, Answer]]


def _missing(liveness: Liveness, operation: Operation, at: str, ask: _Ask, long_s: float) -> str:
    """Return the ranks that keep the operation from ending; "" where others report, or all of them wait, too."""
    ranks, awaited = operation.members.ranks, liveness.awaited(operation)
    index = ranks.index(liveness.rank)
    if not awaited:
        return ""  # it waits for itself
    if operation.peers is None:
        before = ranks[index - 1] if index else liveness.rank
        known = ask([before])
        if before in known and known[before].waits_in(operation):
            return ""
    answers = ask(awaited)
    blocking = awaited
    if operation.peers is None:
        if any(rank in answers and answers[rank].waits_in(operation) for rank in ranks[:index]):
            return ""
        blocking = [
            rank
            for rank in awaited
            if rank not in answers
            or not (answers[rank].waits_in(operation) or answers[rank].sequence >= operation.number)
        ]
    elif operation.tag is None and any(
        rank in answers and answers[rank].waits_long(long_s) for rank in awaited if rank < liveness.rank
    ):
        return ""  # groups are made by ranks that wait for each other
    if blocking and all(rank in answers and answers[rank].waits_long(long_s) for rank in blocking):
        return ""
    return "\n".join(_rows(liveness, operation, at, awaited, answers))


def _deadlocks(liveness: Liveness, operation: Operation, ask: _Ask, long_s: float) -> list[str]:
    """Return the circles that this rank reports.

    A circle is reported by its lowest rank, or, so that few ranks ask all, by the first of the waiting ranks in a row
    before it.
    """
    world = liveness.world
    if world.rank and (before := ask([world.rank - 1]).get(world.rank - 1)) and before.waits_long(long_s):
        return []
    answers = ask(world.ranks) | {world.rank: liveness.own_answer(operation.members.number)}
    reports = []
    for circle in deadlock.circles(liveness.waits(operation.members.number, answers, long_s)):
        reporter = circle[0]
        while reporter - 1 in answers and answers[reporter - 1].waits_long(long_s):
            reporter -= 1
        if reporter == world.rank:
            rows = [_Row([rank], *_doing([answers[rank]])) for rank in circle[:_MAX_CIRCLE]]
            more = [f"    and {counted(len(circle) - _MAX_CIRCLE)}"] if len(circle) > _MAX_CIRCLE else []
            reports.append("\n".join([deadlock.text(circle), *(_line(world, row) for row in rows), *more]))
    return reports


class _Row(NamedTuple):
    ranks: list[int]
    at: str
    detail: str


def _rows(
    liveness: Liveness, operation: Operation, at: str, awaited: Sequence[int], answers: dict[int, Answer]
) -> list[str]:
    world = liveness.world
    missing: dict[object, list[int]] = {}
    waiting: dict[str, list[int]] = {at: [world.rank]}
    begun: dict[str, list[int]] = {}
    for rank in awaited:
        answer = answers.get(rank)
        if answer is not None and operation.peers is None and answer.waits_in(operation):
            waiting.setdefault(answer.state.at, []).append(rank)
        elif answer is not None and operation.peers is None and answer.sequence >= operation.number:
            begun.setdefault("its end" if answer.ended else answer.state.at, []).append(rank)
        else:
            state = (
                liveness.silent(rank, operation.members.number)
                if answer is None
                else (answer.ended, answer.state.at, answer.state.operation)
            )
            missing.setdefault(state, []).append(rank)
    rows = [_Row(ranks, *_doing([answers.get(rank) for rank in ranks], str(state))) for state, ranks in missing.items()]
    rows.sort(key=lambda row: (len(row.ranks), row.ranks[0]))
    lines = []
    if not rows:
        lines.append("  all ranks are in it: the network may be down, or one of them waits elsewhere")
    elif operation.peers is not None:
        lines.append("  it waits for:")
    else:
        count = sum(len(row.ranks) for row in rows)
        lines.append(f"  {counted(count)} {'is' if count == 1 else 'are'} NOT in it:")
    lines += [_line(world, row) for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        rest = sum(len(row.ranks) for row in rows[_MAX_ROWS:])
        lines.append(f"    and {counted(rest)} in {len(rows) - _MAX_ROWS} other states")
    if begun:
        lines.append(f"  {counted(sum(map(len, begun.values())))} began it and went on: {places(begun)}")
    here = sum(map(len, waiting.values()))
    lines.append(f"  {counted(here)} {'waits' if here == 1 else 'wait'} in it at {places(waiting)}")
    return lines


def _line(world: World, row: _Row) -> str:
    return f"    {_who(world, row.ranks):<30}  {row.at:<30}  {row.detail}".rstrip()


def _doing(answers: Sequence[Answer | None], silent: str = "") -> tuple[str, str]:
    first = answers[0]
    if first is None:
        return "", f"no answer: {silent}"
    if first.ended:
        return "", "the program has ended"
    if first.state.operation:
        return first.state.at, f"in {first.state.operation}"
    idle_s = max(answer.state.idle_s for answer in answers if answer is not None)
    last = f" ({first.state.last})" if first.state.last else ""
    what = f"its last call{last}" if first.sequence else "the group was made, no call yet"
    return first.state.at, f"{_duration(idle_s)} since {what}"


def _who(world: World, ranks: Sequence[int]) -> str:
    hosts = sorted({world.hosts[rank] for rank in ranks})
    where = f"node {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} nodes"
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({where}, pid {world.pids[ranks[0]]})"
    return f"ranks {ranges(ranks)} ({where})"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def survey(liveness: Liveness, group: int) -> str:
    """Return the states and stacks of all ranks, equal ones together."""
    world = liveness.world
    others = [rank for rank in world.ranks if rank != world.rank]
    answers = liveness.inquire(group, others, stacks=True) | {world.rank: liveness.own_answer(group, stacks=True)}
    lines = [f"mpiddp: job {world.job}, {counted(world.size)}"]
    lines += [f"  {deadlock.text(each)}" for each in deadlock.circles(liveness.waits(group, answers, SETTLED_S))]
    states = {
        rank: _by_state(answers[rank]) if rank in answers else f"no answer: {liveness.silent(rank, group)}"
        for rank in world.ranks
    }
    for texts in (states, {rank: _stacks_of(answers.get(rank)) for rank in world.ranks}):
        found: dict[str, list[int]] = {}
        for rank, text in texts.items():
            found.setdefault(text, []).append(rank)
        for text, ranks in sorted(found.items(), key=lambda item: (len(item[1]), item[1])):
            if text:
                lines += [f"  {_who(world, ranks)}: {text}"]
    return "\n".join(lines)


def _by_state(answer: Answer) -> str:
    at = f" at {answer.state.at}" if answer.state.operation else ""
    return answer.text() + at


def _stacks_of(answer: Answer | None) -> str:
    return "" if answer is None or not answer.state.stacks else f"stacks\n{answer.state.stacks.rstrip()}"

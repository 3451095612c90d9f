"""The report of a stall: ten lines at most for ten thousand ranks, the minority first, printed by one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpiddp.faults import stalls
from mpiddp.faults.liveness import Answer, State
from mpiddp.mpi.operation import Members, Operation

GROUP, NUMBER = 7, 4711


class MadeUp:
    """A liveness whose other ranks have given answers; None: silent."""

    def __init__(self, rank: int, answers: dict[int, Answer | None]) -> None:
        self.rank, self.answers, self.asked = rank, answers, 0

    def inquire(self, group: int, ranks: Any, stacks: bool = False) -> dict[int, Answer]:
        assert group == GROUP
        self.asked += len(ranks)
        return {rank: found for rank in ranks if (found := self.answers[rank]) is not None}

    def awaited(self, operation: Operation) -> list[int]:
        ranks = operation.members.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self.rank]


def waits(at: str = "train.py:120 in backward") -> Answer:
    return Answer(NUMBER, False, False, State(at, "all_reduce #4711", (GROUP, NUMBER)))


def computes(at: str, idle_s: float = 71.0, last: str = "all_reduce #4710") -> Answer:
    return Answer(NUMBER - 1, False, True, State(at, idle_s=idle_s, last=last))


def warning(rank: int, answers: dict[int, Answer | None], peers: tuple[int, ...] | None = None) -> tuple[str, int]:
    """Return the text that ``rank`` would print, and the number of ranks it asked."""
    size = len(answers)
    members = Members(GROUP, tuple(range(size)), size, 1800.0, SimpleNamespace())  # type: ignore[arg-type]
    world: Any = SimpleNamespace(
        rank=rank, hosts=[f"n{each // 8}" for each in range(size)], pids=range(100, 100 + size)
    )
    operation = Operation("recv" if peers else "all_reduce", members, None, peers, False, NUMBER)
    liveness: Any = MadeUp(rank, answers)
    return stalls.warning(liveness, world, operation, "train.py:120 in backward", 65.0, 120.0), liveness.asked


def test_ten_thousand_ranks_in_ten_lines_the_minority_first() -> None:
    answers: dict[int, Answer | None] = {rank: waits() for rank in range(10_000)}
    for rank in range(3000, 3900):
        answers[rank] = computes(f"data.py:{rank % 9} in __getitem__")
    answers[17] = computes("save.py:88 in save")
    answers[40] = answers[41] = Answer(
        4000, False, False, State("x.py:3 in f", "barrier #12 in the group of ranks 40, 41")
    )
    answers[9000] = None
    answers[9001] = Answer(4, True, True, State())
    for rank in range(20, 9999, 7):
        answers.update({rank: waits(f"other.py:{rank} in g")} if answers[rank] == waits() else {})
    text, _ = warning(0, answers)
    lines = text.splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) < 250, text
    assert lines[0] == "mpiddp: 65 s without progress.  all_reduce #4711 in the group of all 10000 ranks"
    assert lines[1] == "  905 ranks are NOT in it:"
    assert lines[2].startswith("    rank 17 (node n2, pid 117)  ")
    assert lines[2].endswith("71 s since its last call (all_reduce #4710)") and "save.py:88 in save" in lines[2]
    assert "no answer" in lines[3] and "the program has ended" in lines[4]
    assert lines[5].startswith("    ranks 40-41 (node n5)") and lines[5].endswith(
        "in barrier #12 in the group of ranks 40, 41"
    )
    assert lines[7] == "    and 800 ranks in 8 other states"
    assert lines[8].startswith("  9095 ranks wait in it at ")
    assert "next warning in 2 min, error at 30 min" in lines[9] and "python -m mpiddp where" in lines[9]


def test_one_rank_prints_and_the_others_ask_one() -> None:
    answers: dict[int, Answer | None] = {rank: waits() for rank in range(200)}
    for rank in (0, 1, 2, 50, 120):
        answers[rank] = computes("a.py:1 in f")
    asked = [warning(rank, answers) for rank in range(200) if answers[rank] == waits()]
    printed = [text for text, _ in asked if text]
    assert len(printed) == 1 and "ranks 0-2, 50, 120 (3 nodes)" in printed[0]
    assert sum(count for _, count in asked) <= 200 + 3 * 199, "a waiter after a waiter asks that one only"


def test_a_rank_whose_predecessor_died_prints() -> None:
    answers: dict[int, Answer | None] = {0: None, 1: waits(), 2: waits(), 3: waits()}
    text, _ = warning(1, answers)
    assert "rank 0 (node n0, pid 100)" in text and "no answer: dead, stopped, or out of reach" in text
    assert warning(2, answers)[0] == ""


def test_all_in_it_is_said() -> None:
    answers: dict[int, Answer | None] = {rank: waits() for rank in range(4)}
    assert "all ranks are in it: the network may be down" in warning(0, answers)[0]
    assert warning(2, answers)[0] == ""


def test_a_rank_that_went_on_is_not_missing() -> None:
    answers: dict[int, Answer | None] = {
        0: waits(),
        1: computes("a.py:2 in f")._replace(sequence=NUMBER + 3),
        2: waits(),
    }
    text, _ = warning(0, answers)
    assert "NOT in it" not in text and "1 rank began it and went on: a.py:2 in f (1)" in text


@pytest.mark.parametrize(
    ("rank", "peer", "state", "prints"),
    [
        (0, 1, State("a.py:1 in f"), True),  # it computes
        (0, 1, State("a.py:1 in f", "recv", waits_for=(2,)), False),  # it waits for a third one, and warns itself
        (0, 1, State("a.py:1 in f", "recv", waits_for=(0,)), True),  # both wait for each other: the lower one warns
        (1, 0, State("a.py:1 in f", "recv", waits_for=(1,)), False),
    ],
)
def test_messages(rank: int, peer: int, state: State, prints: bool) -> None:
    answers: dict[int, Answer | None] = dict.fromkeys(range(3), waits())
    answers[peer] = Answer(0, False, False, state)
    text, _ = warning(rank, answers, (peer,))
    assert bool(text) == prints
    if prints:
        assert "it waits for:" in text and f"rank {peer} (node n0" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([5], "5"), ([2, 1, 0, 9, 8], "0-2, 8-9"), (range(0, 40, 2), "0, 2, 4, 6, 8, 10 and 14 more")],
)
def test_ranges(ranks: Any, text: str) -> None:
    assert stalls.ranges(ranks) == text

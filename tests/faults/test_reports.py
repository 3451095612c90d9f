"""The report of a stall: ten lines at most for ten thousand ranks, the minority first, printed by one rank."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mpiddp.faults.liveness import Liveness
from mpiddp.faults.picture import State
from mpiddp.faults.reports import Reports
from mpiddp.mpi import processes
from mpiddp.mpi.operation import Call, Members, Operation

GROUP, NUMBER, SIZE = 7, 4711, 10_000


class MadeUp:
    """A liveness whose other ranks have given answers; None: silent."""

    def __init__(self, world: Any, answers: dict[int, State | None]) -> None:
        self.world, self.rank, self.known, self.asked = world, world.rank, answers, 0

    def inquire(self, group: int, ranks: Any, silence_s: float = 0, stacks: bool = False) -> dict[int, State]:
        self.ask(group, ranks)
        return self.answers(group, ranks, silence_s)

    def ask(self, group: int, ranks: Any) -> None:
        self.asked += len(ranks)

    def answers(self, group: int, ranks: Any, silence_s: float) -> dict[int, State]:
        return {rank: self.known[rank] or State(silent="dead, or so") for rank in ranks}

    def begun(self, group: int) -> int:
        return NUMBER

    def own_state(self, group: int, stacks: bool = False) -> State:
        return self.known[self.rank] or waits()

    def awaited(self, operation: Operation | None) -> list[int]:
        ranks: Any = self.world.ranks
        if operation is not None:
            ranks = operation.members.ranks if operation.peers is None else operation.peers
        return [rank for rank in ranks if rank != self.rank]


def waits(at: str = "train.py:120 in backward", size: int = SIZE) -> State:
    return State(at, "all_reduce #4711", GROUP, NUMBER, range(size), 65.0, NUMBER)


def computes(at: str, idle_s: float = 71.0, last: str = "all_reduce #4710") -> State:
    return State(at, begun=NUMBER - 1, idle_s=idle_s, last=last)


def made_up(rank: int, answers: dict[int, State | None]) -> Any:
    size = len(answers)
    hosts, pids = [f"n{each // 8}" for each in range(size)], range(100, 100 + size)
    world: Any = SimpleNamespace(rank=rank, size=size, ranks=range(size), hosts=hosts, pids=pids, outer=(), job="n.1")
    return MadeUp(world, answers)


def awaited(size: int, peers: tuple[int, ...] | None = None) -> Operation:
    members = Members(GROUP, tuple(range(size)), size, 1800.0, SimpleNamespace())  # type: ignore[arg-type]
    return Operation(Call(members, "recv" if peers else "all_reduce", peers=peers, tag=0 if peers else None), NUMBER)


def warning(rank: int, answers: dict[int, State | None], peers: tuple[int, ...] | None = None) -> tuple[str, int]:
    """Return the text that ``rank`` would print, and the number of ranks it asked."""
    liveness = made_up(rank, answers)
    operation = awaited(len(answers), peers)
    return Reports(liveness, lambda reason: "").warning(operation, 65.0, 120.0, 30.0), liveness.asked


def test_ten_thousand_ranks_in_ten_lines_the_minority_first() -> None:
    answers: dict[int, State | None] = {rank: waits() for rank in range(10_000)}
    for rank in range(3000, 3900):
        answers[rank] = computes(f"data.py:{rank % 9} in __getitem__")
    answers[17] = computes("save.py:88 in save")
    answers[40] = answers[41] = State("x.py:3 in f", "barrier #12 in the group of ranks 40, 41", begun=4000)
    answers[9000] = None
    answers[9001] = State(begun=4, ended=True)
    for rank in range(20, 9999, 7):
        answers.update({rank: waits(f"other.py:{rank} in g")} if answers[rank] == waits() else {})
    text, _ = warning(0, answers)
    lines = text.splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) < 250, text
    assert lines[0] == "mpiddp: 65 s without progress.  all_reduce #4711 in the group of all 10000 ranks"
    assert lines[1] == "  905 ranks are NOT in it:"
    assert "no answer" in lines[2] and "the program has ended" in lines[3]
    assert lines[4].startswith("    ranks 40-41 (node n5)")
    assert lines[4].endswith("in barrier #12 in the group of ranks 40, 41")
    assert lines[5].startswith("    rank 17 (node n2, pid 117)  ")
    assert lines[5].endswith("71 s since its last call (all_reduce #4710)") and "save.py:88 in save" in lines[5]
    assert lines[7] == "    and 800 ranks in 8 other states"
    assert lines[8].startswith("  9095 ranks wait in it at ")
    assert "next warning in 2 min, error at 30 min" in lines[9] and "python -m mpiddp where" in lines[9]


def test_one_rank_prints_and_the_others_ask_one() -> None:
    answers: dict[int, State | None] = {rank: waits() for rank in range(200)}
    for rank in (0, 1, 2, 50, 120):
        answers[rank] = computes("a.py:1 in f")
    asked = [warning(rank, answers) for rank in range(200) if answers[rank] == waits()]
    printed = [text for text, _ in asked if text]
    assert len(printed) == 1 and "ranks 0-2, 50, 120 (3 nodes)" in printed[0]
    assert sum(count for _, count in asked) <= 200 + 3 * 199, "a waiter after a waiter asks that one only"


def test_a_rank_whose_predecessor_died_prints() -> None:
    answers: dict[int, State | None] = {0: None, 1: waits(), 2: waits(), 3: waits()}
    text, asked = warning(1, answers)
    assert asked == 3, "a rank that does not answer costs seconds: it is asked once"
    assert "rank 0 (node n0, pid 100)" in text and "no answer: dead, or so" in text
    assert warning(2, answers)[0] == ""


def test_a_thread_may_make_groups_while_the_watchdog_lists_them() -> None:
    liveness = Liveness(SimpleNamespace(rank=0, size=1), SimpleNamespace(thread_multiple=True), raises=False)  # type: ignore[arg-type]
    kept, stop, interval = [made_up(0, {}) for _ in range(50)], threading.Event(), sys.getswitchinterval()
    for each in kept:
        liveness.register(each)

    def make() -> None:
        while not stop.is_set():
            liveness.register(made_up(0, {}))  # gone at once

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20_000):
            assert set(kept) <= set(liveness.known())
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("S", "its process sleeps and lets no thread of Python answer, as in a call into C that holds the GIL"),
        ("Z", "its process has ended"),
        ("T", "its process is stopped, by SIGSTOP"),
    ],
)
def test_a_silent_rank_of_this_host_is_looked_at(monkeypatch: pytest.MonkeyPatch, state: str, why: str) -> None:
    monkeypatch.setattr(processes, "state", {7: state}.get)
    world = SimpleNamespace(hosts="aab", pids=(1, 7, 7))
    liveness: Any = SimpleNamespace(_watched=True, world=world, rank=0, find=lambda _: None)
    assert Liveness._why_silent(liveness, 1, GROUP) == why
    assert Liveness._why_silent(liveness, 2, GROUP) == "dead, stopped, or its node is out of reach"


def test_all_in_it_is_said() -> None:
    answers: dict[int, State | None] = {rank: waits() for rank in range(4)}
    assert "all ranks are in it: the network may be down" in warning(0, answers)[0]
    assert warning(2, answers)[0] == ""


def test_a_rank_that_went_on_is_not_missing() -> None:
    answers: dict[int, State | None] = {0: waits(), 1: computes("a.py:2 in f")._replace(begun=NUMBER + 3), 2: waits()}
    text, _ = warning(0, answers)
    assert "NOT in it" not in text and "1 rank began it and went on: a.py:2 in f (1)" in text
    assert "no rank is missing by now: rank 1 may have begun it too late" in text and "network" not in text


def receives(source: int, waited_s: float = 65.0) -> State:
    return State(f"a.py:{source} in f", f"recv from {source}", ranks=[source], waited_s=waited_s)


@pytest.mark.parametrize(
    ("answer", "prints"),
    [
        (computes("a.py:1 in f"), True),
        (None, True),
        (receives(2), False),  # it waits for a third one, and warns itself
        (receives(2, waited_s=1.0), True),  # it may go on
    ],
)
def test_messages(answer: State | None, prints: bool) -> None:
    text, _ = warning(0, {0: receives(1), 1: answer, 2: computes("a.py:3 in f")}, (1,))
    assert ("it waits for:" in text and "rank 1 (node n0" in text) if prints else text == "", text


def test_one_rank_reports_a_circle() -> None:
    """The lowest one, or the first of those in a row before it that wait, too; others may wait for the circle."""
    answers: dict[int, State | None] = {0: computes("a.py:1 in f"), 1: receives(5), 2: receives(4), 3: receives(2)}
    answers |= {4: receives(3), 5: receives(2), 6: computes("a.py:1 in f"), 7: receives(4)}
    told = {rank: warning(rank, answers, (answers[rank].ranks[0],)) for rank in (1, 2, 3, 4, 5, 7)}  # type: ignore[union-attr]
    assert [rank for rank, (text, _) in told.items() if text] == [1], told
    lines = told[1][0].splitlines()
    chain = "rank 2 waits for rank 4, which waits for rank 3, which waits for rank 2: a deadlock"
    assert lines[0] == f"mpiddp: 65 s without progress.  {chain}"
    assert [line.split()[1] for line in lines[1:4]] == ["2", "4", "3"] and "a.py:4 in f" in lines[1], lines
    assert "in recv from 4" in lines[1] and "next warning in 2 min" in lines[4] and len(lines) == 5
    answers[3] = receives(2, waited_s=1.0)
    assert "deadlock" not in "".join(warning(rank, answers, (4,))[0] for rank in range(1, 8))


def test_where_names_the_circle() -> None:
    liveness = made_up(0, {0: receives(2), 1: receives(0), 2: receives(1)})
    chain = "rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0: a deadlock"
    assert Reports(liveness, lambda reason: "").survey(GROUP).splitlines()[:2] == [
        "mpiddp: job n.1, 3 ranks",
        f"  {chain}",
    ]


def test_a_circle_with_a_collective_in_it() -> None:
    answers: dict[int, State | None] = {rank: waits(size=8) for rank in range(8)} | {3: receives(5)}
    answers[3] = answers[3]._replace(begun=NUMBER - 1)  # type: ignore[union-attr]
    told = [warning(rank, answers, (5,) if rank == 3 else None)[0] for rank in range(8)]
    assert [bool(text) for text in told] == [True] + 7 * [False], told
    assert "rank 3 waits for rank 5, which waits for rank 3: a deadlock" in told[0] and "NOT in it" not in told[0]


def test_ten_thousand_ranks_of_a_circle_ask_few_and_print_few_lines() -> None:
    answers: dict[int, State | None] = {rank: receives((rank + 1) % SIZE) for rank in range(SIZE)}
    assert warning(5000, answers, (5001,)) == ("", 2)
    text, asked = warning(0, answers, (1,))
    assert len(text.splitlines()) == 10 and "9992 more ranks" in text and asked == SIZE - 1

"""The text of a job's picture: equal ranks share a line, and the odd ones come first."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpiddp.faults import picture
from mpiddp.faults.picture import State, cells, rows

HOSTS: Any = SimpleNamespace(hosts=["a", "a", "b", "b"], pids=[10, 11, 12, 13], outer=())


def test_ranks_that_idle_since_one_call_share_the_longest_time() -> None:
    states = {rank: State("x.py:1 in f", begun=3, last="barrier #3", idle_s=70.0 + rank) for rank in range(3)}
    (line,) = rows(HOSTS, cells(states))
    assert line.startswith("    ranks 0-2 (2 nodes) ") and line.endswith("72 s since its last call (barrier #3)")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (State(silent="its process has ended"), "no answer: its process has ended"),
        (State(ended=True), "the program has ended"),
        (State("x.py:1 in f", "recv from rank 1"), "in recv from rank 1"),
        (State("x.py:1 in f"), "in its own code"),
        (State("x.py:1 in f", idle_s=3), "3 s since the group was made, no call yet"),
        (State("x.py:1 in f", begun=2, idle_s=300), "5 min since its last call"),
    ],
)
def test_each_state_has_its_words(state: State, text: str) -> None:
    assert cells({0: state})[0] == (state.at, text)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([5], "5"), ([2, 1, 0, 9, 8], "0-2, 8-9"), (range(0, 40, 2), "0, 2, 4, 6, 8, 10 and 14 more")],
)
def test_ranges(ranks: Any, text: str) -> None:
    assert picture.ranges(ranks) == text

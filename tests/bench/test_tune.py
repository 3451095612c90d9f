from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpiddp.bench import tune
from mpiddp.shm.eager import EagerBuffers

TABLE = ("the built-in table", 1.0)


def times(native: float, two_shot: float, symmetric: float) -> dict[str, tuple[float, float]]:
    return {"native": (native, native), "two_shot": (two_shot, symmetric)}


def test_all_sizes_count_alike():
    measured = {1 << 10: times(1, 4, 4), 1 << 14: times(4, 1, 1), 1 << 18: times(640, 160, 160)}
    name, gain = tune.best(measured, dict.fromkeys(measured, "native"))
    assert (name, gain) == ("two_shot", pytest.approx(4 ** (1 / 3)))


def test_both_kinds_of_arrays_count():
    assert tune.best({1024: times(10, 19, 2)}, {1024: "native"})[0] == "two_shot"
    assert tune.best({1024: times(10, 60, 2)}, {1024: "native"}) == TABLE


def test_a_table_that_changes_with_the_size_is_the_yardstick():
    measured = {1 << 10: times(1, 4, 4), 1 << 18: times(64, 4, 4)}
    assert tune.best(measured, {1 << 10: "native", 1 << 18: "two_shot"}) == TABLE
    assert tune.best(measured, dict.fromkeys(measured, "native"))[0] == "two_shot"


def test_chance_changes_nothing():
    measured = {1 << power: times(1, 0.96, 0.96) for power in range(5, 12)}
    assert tune.best(measured, dict.fromkeys(measured, "native")) == TABLE


@pytest.mark.parametrize(
    ("one_node", "eager", "missing"),
    [
        (True, object(), {"hierarchical", "exchange"}),
        (True, None, {"hierarchical", "exchange", "one_shot"}),
        (False, None, {"two_shot", "scratch", "attach", "exchange", "one_shot"}),
    ],
)
def test_candidates_are_what_the_group_can_run(one_node, eager, missing):
    link = SimpleNamespace(one_node=one_node, find={EagerBuffers: eager}.get)
    found = tune.candidates("all_reduce", link)
    everything = {"native", "one_shot", "two_shot", "scratch", "attach", "hierarchical", "exchange", "ring", "tree"}
    assert set(found) == everything - missing

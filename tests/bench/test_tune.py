from types import SimpleNamespace

import pytest

from mpiddp.bench import tune
from mpiddp.shm.eager import EagerBuffers

TABLE = ("the built-in table", 1.0)


def times(native: float, two_shot: float, symmetric: float) -> dict[str, tuple[float, float]]:
    return {"native": (native, native), "two_shot": (two_shot, symmetric)}


def test_both_kinds_of_arrays_count():
    assert tune.best({1024: times(10, 19, 2)}, {1024: "native"})[0] == "two_shot"
    assert tune.best({1024: times(10, 60, 2)}, {1024: "native"}) == TABLE


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

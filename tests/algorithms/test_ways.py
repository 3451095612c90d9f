"""The ways of ordinary arrays are tried in turn, and all ranks take the one that was the fastest."""

from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.algorithms import ways
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.requests import READY, Steps, drive
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.eager import EagerBuffers

pytestmark = pytest.mark.mpi(min_size=2)


class Tried(ways.Choice):
    """Its processor time passes only in steps, and in waits for them."""

    now = 0.0

    def steps(self, seconds: float, waited: float) -> Steps:
        self.now += seconds
        yield READY
        self.now += waited
        yield READY

    def take(self, way: str | None, **took: tuple[float, float]) -> None:
        drive(self.run({each: self.steps(*times) for each, times in took.items()}, way))

    def chosen(self, **took: tuple[float, float]) -> str:
        for _ in range(ways.TRIES * len(took)):
            assert self.way is None
            self.take(None, **took)
        return str(self.way)


@pytest.fixture
def tried(world: Any, monkeypatch: pytest.MonkeyPatch) -> Tried:
    made = Tried(default_group()._link)
    monkeypatch.setattr(ways, "thread_time", lambda: made.now)
    return made


def test_the_slowest_rank_counts(tried: Tried, world: Any) -> None:
    assert tried.chosen(scratch=(4, 0), attach=(5 if world.rank == world.size - 1 else 1, 0)) == "scratch"


def test_steps_and_waits_count(tried: Tried) -> None:
    assert tried.chosen(scratch=(4, 0), attach=(3, 9), native=(1, 1)) == "native"
    tried.way = None
    assert tried.chosen(scratch=(4, 0), attach=(3.9, 0)) == "scratch", "chance does not choose"


def test_the_ways_are_tried_again_soon_while_the_choice_changes(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "FEW_CALLS", 3)
    monkeypatch.setattr(ways, "MANY_CALLS", 10)
    for way, calls in (("attach", 3), ("attach", 6), ("attach", 10), ("attach", 10), ("scratch", 3), ("scratch", 6)):
        took = {"scratch": (5.0, 0.0), "attach": (1.0 if way == "attach" else 9.0, 0.0)}
        assert tried.chosen(**took) == way
        assert [tried.take(None, **took) or tried.way for _ in range(calls)] == [way] * (calls - 1) + [None]


def test_pieces_warm_up_before_each_choice(tried: Tried) -> None:
    """They write into memory that no other core has read at first, which is faster than ever again."""
    for _ in range(2):
        calls = [tried.next(["pieces", "attach"]) for _ in range(ways.WARM_UPS + 1)]
        assert calls == [*[("pieces", False)] * ways.WARM_UPS, ("pieces", True)]
        tried._took = {"pieces": [2.0] * ways.TRIES, "attach": [1.0] * (ways.TRIES - 1)}
        drive(tried.timed("attach", ()))
        assert tried.way == "attach"


def test_the_description_names_operation_way_and_size(world: Any) -> None:
    found = ways.Ways(default_group()._link)
    for bits, way in ((24, "attach"), (19, "scratch"), (12, None)):
        found.of(ways.Kind("reduce", bits)).way = way
    assert found.described() == {"reduce": "scratch (below 512 KiB), attach (below 16 MiB)"}


def test_the_only_way_and_a_way_that_was_asked_for_are_not_tried(tried: Tried) -> None:
    tried.take("attach", scratch=(1, 0))
    tried.take("attach", scratch=(9, 0), attach=(1, 0))
    assert not tried._took and tried.now == 2


@pytest.mark.parametrize("count", [300_007, 1_100_007])
@pytest.mark.parametrize("async_op", [False, True])
def test_calls_agree_on_a_way_and_then_take_it(
    world: Any, monkeypatch: pytest.MonkeyPatch, async_op: bool, count: int
) -> None:
    """Arrays of up to 4 MiB may go in pieces, too, which is no reading of other processes' memory either."""
    link = default_group()._link
    if link.resource(CrossMemory).fault:
        pytest.skip("there is no choice")
    begins_in_turn = link.find(EagerBuffers) is not None
    in_pieces = begins_in_turn and count < 1 << 20 and world.size <= 4
    others = ways.TRIES + in_pieces * (ways.WARM_UPS + ways.TRIES)
    dist.all_reduce(np.zeros(count, np.float32))  # asks for the ways' memory
    (choices := link.resource(ways.Ways)._choices).clear()
    default_group()._plans.forget()
    reads, read = [], CrossMemory.read
    monkeypatch.setattr(CrossMemory, "read", lambda *args: reads.append(1) or read(*args))
    by_attach = []
    for call in range(others + ways.TRIES + 3):
        x = np.full(count, 1.0 + world.rank, np.float32)
        del reads[:]
        # Ranks that wait and one that does not are in one call.
        work = dist.all_reduce(x, async_op=async_op and world.rank == call % world.size)
        if work is not None:
            work.wait()
        assert (x == world.size * (world.size + 1) / 2).all(), call
        by_attach.append(bool(reads))
    found = [choice.way for choice in choices.values() if choice.way]
    if async_op and not begins_in_turn:
        assert not any(by_attach) and not found
        return
    assert by_attach[:-3] == [False] * others + [True] * ways.TRIES
    assert by_attach[-3:] == [found == ["attach"]] * 3
    assert len(set(link.now.allgather(*found))) == 1
    assert ways.Kind("all_reduce", (4 * count).bit_length(), begins_in_turn * (1 + in_pieces)) in choices

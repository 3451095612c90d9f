"""The ways of ordinary arrays are tried in turn, and all ranks take the one that was the fastest."""

from __future__ import annotations

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


@pytest.fixture
def tried(world: Any) -> ways.Ways:
    return ways.Ways(default_group()._link)


class Clock:
    """Processor time that passes only in steps, and in waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(ways, "thread_time", lambda: self.now)

    def steps(self, seconds: float, waited: float) -> Steps:
        self.now += seconds
        yield READY
        self.now += waited
        yield READY


def chosen(tried: ways.Ways, clock: Clock, took: dict[str, tuple[float, float]]) -> str:
    kind = ways.Kind("all_gather", 20)
    for _ in range(ways.TRIES * len(took)):
        assert tried.chosen(kind) is None
        drive(tried.run(kind, {way: clock.steps(*each) for way, each in took.items()}, None))
    return str(tried.chosen(kind))


def test_the_slowest_rank_counts(tried: ways.Ways, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = 5.0 if world.rank == world.size - 1 else 1.0
    assert chosen(tried, Clock(monkeypatch), {"scratch": (4, 0), "attach": (slow, 0)}) == "scratch"


def test_steps_and_waits_count(tried: ways.Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"scratch": (4.0, 0.0), "attach": (3.0, 9.0), "native": (1.0, 1.0)}
    assert chosen(tried, Clock(monkeypatch), took) == "native"
    tried._chosen.clear()
    clock = Clock(monkeypatch)
    assert chosen(tried, clock, {"scratch": (4, 0), "attach": (3.9, 0)}) == "scratch", "chance does not choose"


def test_the_ways_are_tried_again_now_and_then(tried: ways.Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "CALLS", 5)
    clock, kind = Clock(monkeypatch), ways.Kind("all_gather", 20)
    assert chosen(tried, clock, {"scratch": (9, 0), "attach": (1, 0)}) == "attach"
    for _ in range(5):
        assert tried.chosen(kind) == "attach"
        drive(tried.run(kind, {"scratch": clock.steps(1, 0), "attach": clock.steps(9, 0)}, None))
    assert chosen(tried, clock, {"scratch": (1, 0), "attach": (9, 0)}) == "scratch"


def test_the_description_names_operation_way_and_size(tried: ways.Ways) -> None:
    tried._chosen.update({ways.Kind("reduce", 24): "attach", ways.Kind("reduce", 19): "scratch"})
    assert tried.described() == {"reduce": "scratch (below 512 KiB), attach (below 16 MiB)"}


def test_the_only_way_and_a_way_that_was_asked_for_are_not_tried(
    tried: ways.Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, kind = Clock(monkeypatch), ways.Kind("broadcast", 18)
    drive(tried.run(kind, {"scratch": clock.steps(1, 0)}, "attach"))
    drive(tried.run(kind, {"scratch": clock.steps(9, 0), "attach": clock.steps(1, 0)}, "attach"))
    assert not tried._took and clock.now == 2


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
    turns = [False, False, True] if begins_in_turn and count < 1 << 20 and world.size <= 4 else [False, True]
    dist.all_reduce(np.zeros(count, np.float32))  # asks for the ways' memory
    link.resource(ways.Ways)._chosen.clear()
    link.resource(ways.Ways)._took.clear()
    reads = []
    read = CrossMemory.read
    monkeypatch.setattr(CrossMemory, "read", lambda *args: reads.append(1) or read(*args))
    by_attach = []
    for call in range(len(turns) * ways.TRIES + 3):
        x = np.full(count, 1.0 + world.rank, np.float32)
        del reads[:]
        # Ranks that wait and one that does not are in one call.
        work = dist.all_reduce(x, async_op=async_op and world.rank == call % world.size)
        if work is not None:
            work.wait()
        assert (x == world.size * (world.size + 1) / 2).all(), call
        by_attach.append(bool(reads))
    found = [way for kind, way in link.resource(ways.Ways)._chosen.items() if kind.operation == "all_reduce"]
    if async_op and not begins_in_turn:
        assert not any(by_attach) and not found
        return
    assert by_attach[:-3] == turns * ways.TRIES
    assert by_attach[-3:] == [found == ["attach"]] * 3
    assert len(set(link.now.allgather(*found))) == 1

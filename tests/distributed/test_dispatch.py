"""The bracket of a call: short calls, which do it by themselves, leave the same behind as `calling` does."""

import random
import time

import numpy as np
import pytest
from harness.inputs import finish
from harness.pretend import pretended_nodes

import mpiddp as dist
from mpiddp.algorithms import handshake
from mpiddp.distributed import dispatch
from mpiddp.faults.calls import last_call
from mpiddp.mpi import recorder

pytestmark = pytest.mark.mpi

OPERATIONS = {
    "all_reduce": (lambda x, **options: dist.all_reduce(x, **options), dist.ReduceOp.SUM),
    "broadcast": (lambda x, **options: dist.broadcast(x, 0, **options), 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_way_numbers_records_publishes_and_ends_a_call(world, name, group):
    call, argument = OPERATIONS[name]
    x = np.ones(3)
    call(x, group=group)
    (plan,) = group._plans._plans.values()
    if plan.run is None:
        pytest.skip("no short calls here")
    left = set()
    for way in ("short", "waiting", "queued", "blocking"):
        dist.barrier(group)
        if way == "waiting" and world.rank == 0:
            time.sleep(0.05)
        before = group._link.sequence
        if way == "blocking":
            dispatch.perform(group, plan, (x, argument), (x,))
        elif way == "queued":
            call(x, group=group, async_op=True).wait()
        else:
            call(x, group=group)
        entry = recorder.entries()[-1]
        assert entry.call is plan.call and entry.number == group._link.sequence == before + 1, way
        assert entry.code.co_filename == __file__ and 0 < entry.start <= entry.end, way
        assert not group._link.busy and not dispatch.requests.waiting, way
        left.add(last_call(group._link, group._link.ranks[world.rank]).replace(f" #{entry.number}", ""))
    assert left == {plan.call.record.text()}


def _in_order(world, steps):
    """Return what this rank's elements are after all steps, each of which begins when the one before has ended."""
    values = [1.0 + rank for rank in range(world.size)]
    for name, root in steps:
        if name == "all_reduce":
            values = [sum(values)] * world.size
        elif name == "reduce":
            values[root] = sum(values)
        else:
            values = [values[root]] * world.size
    return values[world.rank]


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("where", ["a node", "several nodes", "symmetric memory"])
@pytest.mark.parametrize("size", [3, 1 << 17, 150_000])
def test_asynchronous_calls_on_one_array_take_place_in_their_order(world, where, size):
    names, rng = [*OPERATIONS, "reduce"], random.Random(size)
    nodes = [rank if where == "several nodes" else 0 for rank in range(world.size)]
    with pretended_nodes(nodes):
        for _ in range(6):
            steps = [(rng.choice(names), rng.randrange(world.size)) for _ in range(3)]
            x, other = dist.symmetric_empty(size) if where == "symmetric memory" else np.empty(size), np.ones(size)
            x[...] = 1.0 + world.rank
            dist.barrier()
            works = []
            for name, root in steps:
                # the last half of an array is an array that shares its memory
                for part in (x[: size // 2], x) if name == "reduce" else (x,):
                    argument = () if name == "all_reduce" else (root,)
                    works.append(getattr(dist, name)(part, *argument, async_op=True))
                    if part is not x:
                        works.append(dist.all_reduce(other, async_op=True))  # it keeps its place behind them
                if world.rank == root:
                    time.sleep(0.003)  # the others go on meanwhile
            finish(works)
            halves = [each for step in steps for each in ([step, step] if step[0] == "reduce" else [step])]
            assert (x[: size // 2] == _in_order(world, halves)).all(), steps
            assert (x[size // 2 :] == _in_order(world, steps)).all(), steps


@pytest.mark.parametrize("rows", [0, handshake.MAX_ROWS])
def test_a_call_keeps_its_number_while_others_are_submitted(world, monkeypatch, rows):
    monkeypatch.setattr(handshake, "MAX_ROWS", rows)  # as in groups of more than 16 ranks
    with pretended_nodes(range(world.size)):
        for _ in range(5):
            arrays = [np.full(size, 1.0 + world.rank) for size in (20_000, 30, 70_000)]
            works = []
            for x in arrays:
                works.append(dist.all_reduce(x, async_op=True))
                if world.rank == 1:
                    works[-1].wait()  # the others are calls ahead
            finish(works)
            assert all((x == sum(range(world.size + 1))).all() for x in arrays)

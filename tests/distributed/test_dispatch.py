"""The bracket of a call: short calls, which do it by themselves, leave the same behind as `calling` does."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.distributed import dispatch
from mpiddp.faults.calls import last_call
from mpiddp.mpi import recorder

pytestmark = pytest.mark.mpi

OPERATIONS = {
    "all_reduce": (lambda x, **options: dist.all_reduce(x, **options), dist.ReduceOp.SUM),
    "broadcast": (lambda x, **options: dist.broadcast(x, 0, **options), 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_way_numbers_records_publishes_and_ends_a_call(world, name):
    group = dist.new_group()
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
    dist.destroy_process_group(group)

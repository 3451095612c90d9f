"""Missing ranks: they are named, and the job goes on."""

import time
from datetime import timedelta

import numpy as np
import pytest
from harness.inputs import total

import mpiddp as dist
from mpiddp.mpi import requests

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.core, pytest.mark.usefixtures("alert")]


def finish_barrier(world, group):
    """Let the missing rank come too, so that nothing of the group stays pending."""
    dist.barrier()
    if world.rank == world.size - 1:
        dist.barrier(group)
    else:
        deadline = time.monotonic() + 10
        while len(group._link.queue) and time.monotonic() < deadline:
            requests.poll()
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("whose", ["the call's", "the group's"])
@pytest.mark.mpi(min_size=2)
def test_timeout_of_an_asynchronous_barrier(world, whose):
    call, group = ({"timeout": 0.2}, dist.new_group()) if whose == "the call's" else ({}, dist.new_group(timeout=0.2))
    missing = world.size - 1
    if world.rank != missing:
        submitted = dist.barrier(group, async_op=True, **call)
        for wait, limit in ((submitted.wait, "0.2"), (lambda: submitted.wait(0.1), "0.1")):
            text = rf"(?s)did not finish in {limit} s.*\n    rank {missing} \("
            with pytest.raises(dist.DistTimeoutError, match=text) as caught:
                wait()
            assert isinstance(caught.value, TimeoutError) and not submitted.is_completed()
    finish_barrier(world, group)


def test_timeout_of_a_short_blocking_call_ends_the_group(world, eager_buffers):
    """Some ranks have made the call and some have not, so no later one would meet its like. In MPI it ends the job."""
    group = dist.new_group(timeout=0.3)
    missing = world.size - 1
    if world.rank == missing:
        dist.barrier()
        assert total(group, 1) == world.size, "the others' arrays are there"
    text = r"all_reduce #\d .* did not finish in 0.3 s (?s:.*)\n    ranks? \d"
    with pytest.raises(dist.DistTimeoutError, match=text):
        dist.all_reduce(np.ones(1), group=group)
    with pytest.raises(dist.DistTimeoutError, match="cannot be used any more"):
        dist.all_reduce(np.ones(1), group=group)
    if world.rank != missing:
        dist.barrier()
    dist.destroy_process_group(group)
    dist.barrier()


def told(group, rank):
    """Return what a rank of the group has told this one of its monitored barriers."""
    liveness = group._monitor.job.liveness
    liveness.progress()
    return liveness.barriers.get((group._link.id, group._link.ranks[rank]), (0, 0))


def test_monitored_barrier(world):
    for _ in range(3):
        assert dist.monitored_barrier() is None
        dist.monitored_barrier(timeout=5.0, wait_all_ranks=True)
    group = dist.new_group(list(reversed(range(world.size))), sort_ranks=False)
    dist.monitored_barrier(group, timedelta(seconds=5))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.mpi(min_size=2)
def test_monitored_barrier_names_the_missing_ranks(world, wait_all_ranks, group):
    late = list(range(2, world.size)) if world.size > 2 else [1]
    if world.rank == 0:
        for rank in set(range(1, world.size)) - set(late):
            while not told(group, rank)[0]:  # it may come later than rank 0 gives up
                time.sleep(0.001)
        names = f"Ranks {', '.join(map(str, late))}" if wait_all_ranks and len(late) > 1 else f"Rank {late[0]}"
        with pytest.raises(RuntimeError, match=rf"\[Rank 0\]: {names} failed to pass monitoredBarrier in 150 ms"):
            dist.monitored_barrier(group, 0.15, wait_all_ranks)
    elif world.rank not in late:
        with pytest.raises(
            dist.DistTimeoutError, match=f"Rank {world.rank} successfully reached monitoredBarrier, but"
        ):
            dist.monitored_barrier(group, 10, wait_all_ranks)
    dist.barrier()
    if world.rank in late:  # hears at once that rank 0 has given up
        began = time.monotonic()
        with pytest.raises(dist.DistTimeoutError, match="successfully reached monitoredBarrier, but"):
            dist.monitored_barrier(group, 10, wait_all_ranks)
        assert time.monotonic() - began < 5
    for _ in range(3):
        dist.monitored_barrier(group, 10)
    assert total(group, 1) == world.size


@pytest.mark.mpi(min_size=2)
def test_an_old_answer_is_none_to_a_later_barrier(world, group):
    expected = "timed out in monitoredBarrier after 0 ms.\n No ranks successfully" if world.rank == 0 else "reached"
    for late in (False, True):
        if late == (world.rank == 0):  # its answer is found at the next barrier
            with pytest.raises(dist.DistTimeoutError, match=expected):
                dist.monitored_barrier(group, timedelta(seconds=0))
        dist.barrier()
    dist.monitored_barrier(group, 10)

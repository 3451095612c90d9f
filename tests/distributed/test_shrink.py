"""Making the world smaller while all live; jobs with dead ranks are marked as ``launch``."""

import time

import numpy as np
import pytest
from harness.inputs import total

import mpiddp as dist
from mpiddp.distributed import parting
from mpiddp.mpi import lazy

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]


@pytest.fixture
def afterwards(anew, monkeypatch):
    yield
    monkeypatch.setattr(parting, "_WAIT_S", 0.2)  # a rank that was excluded waits in vain
    everybody = lazy.MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(0.001)


@pytest.mark.parametrize("place", ["first", "all but one"])
def test_world_without_some_ranks(world, afterwards, place):
    excluded = {"first": [0], "all but one": list(range(1, world.size))}[place]
    if world.size == 1:
        excluded = []
    old, part = dist.group.WORLD, dist.new_group([0])
    left = [rank for rank in range(world.size) if rank not in excluded]
    if world.rank in excluded:
        return
    made = dist.shrink_group(excluded)
    assert made is dist.group.WORLD is not old
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(world.rank), len(left))
    assert dist.get_pg_count() == 1, "all other groups have ended"
    for group in (old, part) if world.rank == 0 else (old,):
        with pytest.raises(ValueError, match="has been destroyed"):
            dist.barrier(group)
    assert total(None, world.rank) == sum(left)
    x = np.full(300_000, 1.0)
    dist.all_reduce(x)
    assert (x == len(left)).all()
    if len(left) > 1:
        again = dist.shrink_group([len(left) - 1]) if dist.get_rank() < len(left) - 1 else None
        assert again is None or total(None, 1) == len(left) - 1


def test_unfinished_operations_are_given_up_only_if_that_is_asked_for(world, afterwards):
    work = dist.irecv(np.ones(1), src=world.rank, tag=7)
    with pytest.raises(dist.DistError, match="not finished"):
        dist.shrink_group([])
    assert total(None, 1) == world.size, "nothing has happened"
    dist.shrink_group([], shrink_flags=dist.SHRINK_ABORT)
    with pytest.raises(dist.DistError, match="given up"):
        work.wait()
    assert total(None, 1) == world.size


def test_wrong_arguments(world):
    with pytest.raises(ValueError, match="should be within"):
        dist.shrink_group([world.size])
    with pytest.raises(ValueError, match=f"rank {world.rank} is to be excluded"):
        dist.shrink_group([world.rank])
    with pytest.raises(TypeError, match="integer"):
        dist.shrink_group([0.5])
    with pytest.raises(ValueError, match="new_group makes others"):
        dist.shrink_group([], group=dist.new_group())
    assert total(None, 1) == world.size

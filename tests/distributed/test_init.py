"""The default group: its beginning, its end, and another communicator."""

import numpy as np
import pytest
from harness.inputs import total

import mpiddp as dist
from mpiddp.mpi import lazy

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]


def test_destroy_everything_and_begin_again(world):
    groups = [dist.new_group(), dist.new_group([0])]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert groups[0]._link.closed
    with pytest.raises(AssertionError, match="cannot be None"):
        dist.destroy_process_group()
    missing = "Default process group has not been initialized, please make sure to call init_process_group"
    for call in (dist.get_rank, dist.barrier, lambda: dist.all_reduce(np.ones(1)), dist.new_group):
        with pytest.raises(ValueError, match=missing):
            call()
    with pytest.raises(ValueError, match="destroyed"):
        dist.all_reduce(np.ones(1), group=groups[0])
    dist.init_process_group()
    assert dist.get_pg_count() == 1
    assert total(None, 1) == world.size


def test_init_with_something_else_than_a_communicator(world):
    for wrong in (3, "world", np.ones(1)):
        dist.destroy_process_group()
        with pytest.raises(TypeError, match="intracommunicator"):
            dist.init_process_group(comm=wrong)
        dist.init_process_group()
    # The rank without it hears of it at once; the others would wait for it.
    dist.destroy_process_group()
    part = lazy.MPI.COMM_WORLD.Split(lazy.MPI.UNDEFINED if world.rank == 0 else 1)
    if world.rank == 0:
        for null in (part, lazy.MPI.COMM_NULL):
            with pytest.raises(ValueError, match=r"got MPI\.COMM_NULL.* give these ranks a communicator"):
                dist.init_process_group(comm=null)
    else:
        part.Free()
    dist.init_process_group()
    assert total(None, 1) == world.size

"""Programs in which some ranks of MPI's world are a guest's, and the others go on by themselves: ``guest.py CASE``."""

import os
import sys
import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
case = sys.argv[1]
SHORT_S = 2.0


def rounds(dist, comm, groups=True):
    """Communicate in all ways, and check the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (comm.rank, comm.size) and os.environ["RANK"] == str(rank)
    for count in (1, 5, 3000, 100_001):
        x = np.full(count, float(rank))
        dist.all_reduce(x)
        assert (x == sum(range(size))).all(), (count, x)
        dist.broadcast(x, src=size - 1)
    told = [None] * size
    dist.all_gather_object(told, {"rank": world.rank})
    assert [each["rank"] for each in told] == comm.allgather(world.rank)
    x = np.array([float(rank)])
    if size > 1:
        work = dist.isend(x, dst=(rank + 1) % size)
        x = np.empty(1)
        assert dist.recv(x, src=(rank - 1) % size) == x[0] == (rank - 1) % size
        work.wait()
    if groups:
        last = dist.new_group([size - 1])
        assert (last == dist.GroupMember.NON_GROUP_MEMBER) == (rank != size - 1)
        both = dist.new_group(range(size)[::-1], sort_ranks=False)
        dist.all_reduce(x := np.ones(2), group=both)
        assert (x == size).all() and both.rank() == size - 1 - rank


def caught(dist, kinds, call):
    """Return the error that a call raises on this rank, or a later one of the group."""
    try:
        for _ in range(3):
            call()
    except kinds as error:
        return error
    raise AssertionError(f"none of {kinds} has been raised on rank {world.rank}")


def mistakes(dist, comm):
    """Time out, disagree, lose a rank; destroy and begin again after each."""
    last = comm.size - 1

    def late():
        time.sleep(2 * SHORT_S if comm.rank == last else 0)
        dist.all_reduce(np.ones(3))

    def late_in_mpi():
        time.sleep(2 * SHORT_S if comm.rank == last else 0)
        dist.all_gather_object([None] * comm.size, 3)

    def different():
        dist.all_reduce(np.ones(3 + (comm.rank == last)))

    for call, kind in ((late, "DistTimeoutError"), (late_in_mpi, "DistTimeoutError"), (different, "MismatchError")):
        dist.init_process_group(comm=comm, timeout=SHORT_S if call is not different else None)
        rounds(dist, comm)
        error = caught(dist, getattr(dist, kind), call)
        assert f"{comm.size} ranks (" in str(error) and "of the world)" in str(error), error
        caught(dist, getattr(dist, kind), dist.barrier)
        began = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - began < 5, "the others were waited for"
        comm.Barrier()


def guest():
    import mpiddp as dist

    return dist


match case:
    case "silent":  # the first three never hear of mpiddp: one sleeps, one computes, one waits in MPI_Recv
        inside = world.rank >= 3
        part = world.Split(0 if inside else MPI.UNDEFINED)
        if world.rank == 0:
            time.sleep(10)
        elif world.rank == 1:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                np.linalg.inv(np.eye(200))
        elif world.rank == 2:
            assert world.recv(source=3) == "the end"
        else:
            dist = guest()
            for _ in range(3):
                dist.init_process_group(comm=part)
                rounds(dist, part)
                dist.destroy_process_group()
            mistakes(dist, part)
            dist.init_process_group(comm=part)
            rounds(dist, part)
            if world.rank == 3:
                world.send("the end", dest=2)
    case _:
        raise ValueError(case)
print(f"rank {world.rank} is through", flush=True)

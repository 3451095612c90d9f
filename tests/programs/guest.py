"""Programs in which some ranks of MPI's world are a guest's, and the others go on by themselves: ``guest.py CASE``."""

import contextlib
import itertools
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
case = sys.argv[1]
SHORT_S = 3.0


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


def caught(kinds, call):
    """Return the error that a call raises on this rank, or a later one of the group."""
    try:
        for _ in range(3):
            call()
    except kinds as error:
        return error
    raise AssertionError(f"none of {kinds} has been raised on rank {world.rank}")


def mistakes(dist, comm, count):
    """Time out, disagree, lose a rank; destroy and begin again after each."""
    last = comm.size - 1

    def wait_for_the_others():
        for _ in range(last if comm.rank == last else 0):  # until they have given up
            while not comm.Iprobe():
                time.sleep(0.01)
            comm.recv()

    def one_makes_a_group():
        if comm.rank < last:
            time.sleep(0.5)  # the other one waits by then
            dist.barrier()
        dist.new_group([0])

    calls = [
        (dist.DistTimeoutError, lambda: dist.all_gather_object([None] * comm.size, 3)),  # in MPI
        (dist.MismatchError, lambda: dist.all_reduce(np.ones(3 + (comm.rank == last)))),
        (dist.MismatchError, one_makes_a_group),
        (dist.DistTimeoutError, lambda: dist.all_reduce(np.ones(3))),
        (dist.DistTimeoutError, lambda: dist.new_group([0])),
    ]
    for kind, call in calls[:count]:
        late = kind is dist.DistTimeoutError
        dist.init_process_group(comm=comm, timeout=SHORT_S if late else None)
        dist.barrier()
        if late:
            wait_for_the_others()
        error = caught(kind, call)
        if late and comm.rank != last:
            comm.send(None, last)
        assert f"{comm.size} ranks (" in str(error) and "of the world)" in str(error), error
        caught(kind, dist.barrier)
        began = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - began < 5, "the others were waited for"
        comm.Barrier()


def guest():
    import mpiddp as dist

    return dist


def host(steps, rng, comm, act=None):
    """Run a random program of collectives on MPI's world, checked, with ``act`` between its begin and its end."""
    for step in range(steps):
        kind, count, root = int(rng.integers(5)), int(rng.integers(1, 5000)), int(rng.integers(comm.size))
        all_x = rng.integers(0, 1000, (comm.size, comm.size, count)).astype(float)
        sent = MPI.Request()
        x, y = all_x[comm.rank].copy(), np.empty_like(all_x[0])
        match kind:
            case 0:
                request, expected = comm.Iallreduce(x, y), all_x.sum(0)
            case 1:
                request, expected = comm.Ialltoall(x, y), all_x[:, comm.rank]
            case 2:
                y[:] = x
                request, expected = comm.Ibcast(y, root), all_x[root]
            case 3:
                request, expected = comm.Iallgather(x[0], y), all_x[:, 0]
            case _:
                right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                sent = comm.Isend(x, right, 7)
                request, expected = comm.Irecv(y, left, 7), all_x[left]
        if act is not None:
            act(step)
        request.Wait()
        sent.Wait()
        assert (y == expected).all(), (kind, step)


def trains(dist, comm, seed):
    """Yield after each step of a guest's life: it trains, errs, is destroyed, and starts again."""
    rng = np.random.default_rng(seed)  # alike on all ranks of comm
    while True:
        victim, way = int(rng.integers(comm.size)), int(rng.integers(4))
        dist.init_process_group(comm=comm)
        dist.manual_seed(1)
        model = dist.DistributedDataParallel(dist.nn.Linear(6, 2))
        optimizer = dist.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(int(rng.integers(1, 5))):
            optimizer.zero_grad()
            model((rng.random((4, 6)) + comm.rank).astype("f4")).sum().backward()
            optimizer.step()
            yield
        told = comm.allgather(model.module.weight.data.tobytes())
        assert set(told) == {told[0]}
        mine = victim == comm.rank
        x = np.ones(int(rng.integers(1, 9)) + (mine and way == 1))
        group = dist.new_group(timeout=SHORT_S if way == 0 else None)
        try:
            if way == 2 and mine:
                raise KeyError("of the program")  # it leaves the group, where the others wait
            if way == 0 and mine:
                for rank in range(1, comm.size):  # until the others have given up
                    comm.recv(source=(victim + rank) % comm.size)
            if way != 3:
                dist.all_reduce(x, group=group)
                dist.barrier(group)
                assert comm.size == 1, "errors are raised on all ranks"
        except (dist.DistTimeoutError, dist.MismatchError, KeyError) as error:
            assert comm.size > 1 or mine, error
            if way == 0 and not mine:
                comm.send(None, victim)
        with contextlib.suppress(dist.MismatchError):  # it meets the calls of others
            dist.destroy_process_group()
        comm.Barrier()
        yield


match case:
    case "silent":  # the first two never hear of mpiddp: one computes and sleeps, one waits in MPI_Recv
        inside = world.rank >= 2
        part = world.Split(0 if inside else MPI.UNDEFINED)
        if world.rank == 0:
            for _ in range(10):
                np.linalg.inv(np.eye(500))
                time.sleep(0.3)
        elif world.rank == 1:
            assert world.recv(source=2) == "the end"
        else:
            dist = guest()
            for _ in range(3):
                dist.init_process_group(comm=part)
                rounds(dist, part)
                dist.destroy_process_group()
            mistakes(dist, part, 3)
            dist.init_process_group(comm=part)
            rounds(dist, part)
            if world.rank == 2:
                world.send("the end", dest=1)
    case "solver":  # some ranks train between the world's collectives; the others, too, or they make only these
        first, count = map(int, sys.argv[2:4])
        SHORT_S = 1.0
        for seed in range(first, first + count):
            rng = np.random.default_rng(seed)
            inside = rng.permutation(world.size)[: rng.integers(2, world.size)]
            color = 0 if world.rank in inside else (1, MPI.UNDEFINED)[seed % 2]
            part = world.Split(color, int(rng.integers(-1, 2)) * world.rank)
            trained = part != MPI.COMM_NULL
            life = trains(guest(), part, seed + color) if trained else itertools.repeat(None)
            host(40, rng, world, lambda _, life=life: next(life))
            if trained and guest().is_initialized():
                guest().destroy_process_group()
            if world.rank == 0:
                print("through with seed", seed, flush=True)
    case "halves":  # two guests at once, of different sizes, that run different programs
        color = int(world.rank >= 2)
        part = world.Split(color, -world.rank)
        dist = guest()
        if color:
            mistakes(dist, part, 5)
        else:
            life = trains(dist, part, 3)
            for _ in range(15):
                next(life)
            if dist.is_initialized():
                dist.destroy_process_group()
        world.Barrier()
        dist.init_process_group(timeout=30)
        rounds(dist, world)
        dist.destroy_process_group()
        dist.init_process_group(comm=part)
        rounds(dist, part)
    case "communicators":  # of all kinds, one after the other, beside the job of the world
        dist = guest()
        dist.init_process_group(rank=world.rank, world_size=world.size)
        rounds(dist, world)
        dist.destroy_process_group()
        half = world.Split(world.rank % 2)
        session = MPI.Session.Init()
        whole = session.Create_group("mpi://WORLD")
        kinds = {
            "reverse": world.Split(0, -world.rank),
            "self": MPI.COMM_SELF,
            "merged": MPI.Intracomm(half).Create_intercomm(0, world, 1 - world.rank % 2).Merge(bool(world.rank % 2)),
            "Fortran": MPI.Comm.f2py(half.py2f()),
            "C": MPI.Comm.fromhandle(half.handle),
            "session": MPI.Intracomm.Create_from_group(whole, "guest"),
        }
        for name, comm in kinds.items():
            print(name, flush=True)
            os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
            dist.init_process_group(comm=comm)
            assert dist.group.WORLD.comm == comm
            rounds(dist, comm)
            dist.destroy_process_group()
            assert os.environ["WORLD_SIZE"] == str(world.size)
        dist.init_process_group()
        rounds(dist, world)
        kinds["session"].Free()
        whole.Free()
        session.Finalize()
    case "MPMD":  # beside solver.c, which makes a communicator of the other ranks and sums four times
        part = world.Split(0, -world.rank)
        dist = guest()
        for step in range(4):
            total = np.empty(1, np.intc)
            world.Allreduce(np.array([world.rank + step], np.intc), total)
            assert total == sum(range(world.size)) + world.size * step
            if step < 3:
                dist.init_process_group(comm=part)
                rounds(dist, part)
                dist.destroy_process_group()
    case "raises":  # the world's own group, which would end the program without on_error
        dist = guest()
        dist.init_process_group(on_error="raise")
        caught(dist.MismatchError, lambda: dist.all_reduce(np.ones(3 + (world.rank == 1))))
        dist.destroy_process_group()
        dist.init_process_group()
        rounds(dist, world)
    case "aborts":  # the program, on request of a guest; rank 0 is outside of it
        part = world.Split(0 if world.rank else MPI.UNDEFINED)
        if world.rank:
            dist = guest()
            dist.init_process_group(comm=part, on_error="abort")
            dist.all_reduce(np.ones(2 + world.rank))
            dist.barrier()
        world.Barrier()
    case "killed":  # under ULFM: rank 0, of no guest, or one of the guest's
        part = world.Split(0 if world.rank else MPI.UNDEFINED)
        if world.rank == 0:
            time.sleep(1)
            if sys.argv[2] == "host":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6)
        else:
            dist = guest()
            dist.init_process_group(comm=part)
            rounds(dist, part)
            if sys.argv[2] == "guest":
                if part.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    for _ in range(3):
                        dist.all_reduce(np.ones(3))
                    raise AssertionError("no error")
                except dist.RankFailedError as error:
                    assert error.ranks == [1] and "rank 1 (2 of the world) of 3 died" in str(error), error
                dist.destroy_process_group()
                part = part.Shrink()
                dist.init_process_group(comm=part)
            end, left_s = time.monotonic() + 3, np.ones(1)
            while left_s[0] > 0:
                rounds(dist, part, groups=False)
                left_s[0] = end - time.monotonic()
                dist.all_reduce(left_s, dist.ReduceOp.MIN)  # so that all stop after the same round
        print(f"rank {world.rank} is through", flush=True)
        time.sleep(3)  # another rank may still be in the last call, and this one's end is a death to it
        os._exit(0)  # MPI_Finalize would wait for the dead
    case _:
        raise ValueError(case)
print(f"rank {world.rank} is through", flush=True)

"""One rank dies, and the others go on: ``survivors.py CASE VICTIM SIGNAL``, under ``mpirun --with-ft ulfm``."""

import gc
import os
import pickle
import signal
import sys
import time

import numpy as np

import mpiddp as dist

case, victim, number = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
dist.init_process_group()
me, size = dist.get_rank(), dist.get_world_size()
others = [rank for rank in range(size) if rank != victim]
short, middle, long, one = np.ones(3), np.ones(5000), np.ones(1 << 20), np.ones(1)


def dies():
    if me == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        time.sleep(60)


CALLS = {
    "short all_reduce": lambda: dist.all_reduce(short),
    "long all_reduce": lambda: dist.all_reduce(long),
    "all_reduce in MPI": lambda: dist.all_reduce(middle, algorithm="native"),
    "receiving from any": lambda: dist.recv(one),
    "sending": lambda: dist.send(long, dst=victim),
    "making a group": lambda: (dist.new_group([0]), dist.barrier()),
    "monitored_barrier": dist.monitored_barrier,
}
"""That begin after the death."""


def wait(case):
    match case:
        case "symmetric all_reduce":
            x = dist.symmetric_empty(1 << 19)
            x[:] = 1
            dies()
            dist.all_reduce(x)
        case "asynchronous":
            works = [dist.all_reduce(np.ones(n), async_op=True) for n in (3, 300_000)]
            dies()
            for work in works:
                work.wait()
            dist.all_reduce(short)
        case "a group without the victim":
            group = dist.new_group(others)
            dies()
            if me == others[0]:
                dist.recv(one, src=victim)
            dist.barrier(group)
        case "receiving after it is known" | "asking":
            work = dist.irecv(one, src=victim)
            dies()
            time.sleep(1.5 if "known" in case else 0)
            while case == "asking" and not work.is_completed():
                time.sleep(0.01)
            work.wait()
        case "isend":
            from mpiddp.mpi.lazy import MPI

            dies()
            while not MPI.COMM_WORLD.Get_failed().size:  # MPI knows before the watchdog does
                MPI.COMM_SELF.Iprobe()
            dist.isend(long, dst=victim).wait()
            dist.barrier()
        case "in the middle of making a group":
            from mpiddp.mpi.link import Link

            own = Link._own
            Link._own = lambda self, comm: (dies(), own(self, comm))[1]
            dist.new_group()
        case _:
            dies()
            CALLS[case]()


def check():
    ranks = dist.get_world_size()
    for n in (1, 3000, 1 << 18):
        x = np.full(n, 1.0 + dist.get_rank())
        dist.all_reduce(x)
        assert (x == ranks * (ranks + 1) / 2).all(), x
    x = dist.symmetric_empty(1 << 19)
    x[:] = 1
    work = dist.all_reduce(x, async_op=True)
    y = np.zeros(1)
    reply = dist.irecv(y, src=(dist.get_rank() - 1) % ranks)
    dist.isend(np.full(1, 1.0 * dist.get_rank()), dst=(dist.get_rank() + 1) % ranks).wait()
    reply.wait(), work.wait()
    assert (x == ranks).all() and y == (dist.get_rank() - 1) % ranks
    dist.new_group([ranks - 1])
    dist.barrier()
    assert int(os.environ["RANK"]) == dist.get_rank() and int(os.environ["WORLD_SIZE"]) == ranks


def caught(kind, call, *args):
    """Return the error that a call raises."""
    try:
        call(*args)
    except kind as error:
        return error
    raise AssertionError(f"{me} noticed nothing of {call}")


def go_on(case):
    error = caught(dist.RankFailedError, wait, case)
    assert pickle.loads(pickle.dumps(error)).ranks == error.ranks == [victim], error.ranks
    group = dist.shrink_group(error.ranks)
    assert group is dist.group.WORLD and group.size() == size - 1
    assert dist.get_rank() == others.index(me)
    check()
    sys.stdout.write(f"{me} went on\n")


def keep_symmetric_arrays():
    x, kept = dist.symmetric_empty(1 << 19), dist.symmetric_empty(1 << 19)
    y = np.empty(1 << 19, np.float32)
    x[...] = kept[...] = 10.0**me
    dist.all_reduce(x)
    assert (x == sum(10.0**rank for rank in range(size))).all()
    if me == victim:
        x[...] = 7777
    dist.barrier()
    dies()
    dist.shrink_group(caught(dist.RankFailedError, dist.all_reduce, y).ranks)
    new = dist.symmetric_empty(1 << 19)
    expected = sum(10.0**rank for rank in others)
    for what, array in {"old": x, "part": x[5:], "ordinary": y, "new": new}.items():
        for algorithm in (None, "two_shot", "hierarchical"):
            array[...] = 10.0**me
            dist.barrier()
            dist.all_reduce(array, algorithm=algorithm)
            assert (array == expected).all(), (what, algorithm, array)
            dist.barrier()
    mixed = x if me == others[0] else new
    mixed[...] = 10.0**me
    dist.all_reduce(mixed)
    assert (mixed == expected).all(), mixed
    del x, array, mixed
    gc.collect()
    new[...] = kept[...] = 10.0**me
    for array in (new, kept):
        dist.all_reduce(array)
        assert (array == expected).all(), array
    sys.stdout.write(f"{me} is right\n")


def meet_it_in_the_last_barrier():
    """One rank meets the death there, and another one does not."""
    from mpiddp.faults.leaving import Leaving
    from mpiddp.mpi.lazy import MPI

    wait_for_all = Leaving._wait_for_all

    def wait_and(self, job, limit_s):
        wait_for_all(self, job, limit_s)
        if size == job.world.size:
            dies()
            while me == 2:
                MPI.COMM_SELF.Iprobe()
                job.failures.raise_if_failed()
                time.sleep(0.01)

    Leaving._wait_for_all = wait_and


def use_the_old_group():
    dies()
    for call in (
        dist.barrier,
        dist.barrier,
        lambda: dist.all_reduce(short),
        lambda: dist.isend(short, dst=0).wait(),
        lambda: dist.all_reduce(long, async_op=True).wait(),
        lambda: dist.new_group([me]),
    ):
        assert "died" in str(caught(dist.RankFailedError, call)), call
    old = dist.group.WORLD
    dist.shrink_group([])
    dist.barrier()
    assert "has been destroyed" in str(caught(ValueError, dist.barrier, old))
    sys.stdout.write("all said so\n")


def lose_a_rank_after_another_has_ended(shrink):
    """Rank 0's program has ended when the victim dies."""
    if me == 0:
        return
    dies()
    error = caught(dist.RankFailedError, dist.recv, one, victim)
    if shrink:
        dist.shrink_group(error.ranks)
    else:
        dist.destroy_process_group()
        dist.init_process_group()
    dist.barrier()
    sys.stdout.write(f"{me} is rank {dist.get_rank()} of {dist.get_world_size()}\n")


def lose_two_and_then_another():
    """Ranks 1 and 4 die at once, and rank 0 while the others regroup."""
    died = []
    for step in range(100):
        if step == 20 and me in (1, 4) and not died:
            os.kill(os.getpid(), number)
        try:
            x = np.ones(1 << 15)
            dist.all_reduce(x)
            assert (x == dist.get_world_size()).all()
        except dist.RankFailedError as error:
            if me == 0:
                os.kill(os.getpid(), number)
            died += error.ranks
            dist.shrink_group([])
    dist.barrier()
    sys.stdout.write(f"{me} is rank {dist.get_rank()} of {dist.get_world_size()}\n")


def revoke():
    """The revocations of a failure arrive in any order: here only the group's, which may be the first."""
    group = dist.new_group()
    try:
        if me == 0:
            time.sleep(0.2)
            for comm in group._link.comms:
                comm.Revoke()
            dist.barrier()
        else:
            dist.all_reduce(short, group=group, async_op=True).wait()
    except dist.RankFailedError as error:
        print("told:", error, flush=True)
    dist.shrink_group([])
    dist.all_reduce(short)


SCENARIOS = {
    "symmetric arrays": keep_symmetric_arrays,
    "the last barrier": meet_it_in_the_last_barrier,
    "the old group": use_the_old_group,
    "several": lose_two_and_then_another,
    "revoked": revoke,
}
match case:
    case "nobody catches it":
        dies()
        dist.barrier()
    case "waited for at the end":
        if me == victim:
            time.sleep(1)
            dies()
    case "another has ended, shrink_group" | "another has ended, init_process_group":
        lose_a_rank_after_another_has_ended("shrink" in case)
    case _ if case in SCENARIOS:
        SCENARIOS[case]()
    case _:
        go_on(case)

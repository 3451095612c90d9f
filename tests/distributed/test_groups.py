import gc
import itertools
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from harness.inputs import calls, total

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.faults import this_job
from mpiddp.mpi import cuda_aware, lazy
from mpiddp.parallel import DiLoCo, GradBucket, Timeline, allreduce_hook

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core, pytest.mark.usefixtures("anew")]

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def test_world(world):
    whole = dist.group.WORLD
    assert isinstance(whole, dist.ProcessGroup)
    assert (whole.rank(), whole.size()) == (world.rank, world.size)
    assert dist.get_process_group_ranks(None) == dist.get_process_group_ranks(whole) == list(range(world.size))
    assert dist.get_backend() == "mpi"
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    assert dist.get_pg_count() >= 1
    assert dist.get_node_local_rank() == world.rank
    assert dist.is_initialized()
    with pytest.raises(ValueError, match="trying to initialize the default process group twice!"):
        dist.init_process_group()


def test_without_a_gpu_mpi_is_not_asked_about_them(world, monkeypatch):
    """MPICH 3.4 ends a process that asks."""
    monkeypatch.setattr(cuda_aware, "_answer", lambda library: pytest.fail("asked"))
    dist.destroy_process_group()
    dist.init_process_group()


def test_every_subset(world):
    for count in range(1, world.size + 1):
        for ranks in itertools.permutations(range(world.size), count):
            group = dist.new_group(list(map(np.int32, ranks)), sort_ranks=False)
            if world.rank not in ranks:
                assert group == NON_MEMBER == -100
                assert dist.get_rank(group) == dist.get_world_size(group) == -1
                with pytest.raises(ValueError, match="Invalid process group"):
                    dist.get_backend(group)
                continue
            assert dist.get_process_group_ranks(group) == list(ranks)
            assert dist.get_rank(group) == ranks.index(world.rank)
            assert dist.get_world_size(group) == count
            assert total(group, world.rank) == sum(ranks)
            for place, rank in enumerate(ranks):
                assert dist.get_group_rank(group, rank) == place
                assert dist.get_global_rank(group, place) == rank
                x = np.array([world.rank])
                dist.broadcast(x, src=np.int64(rank), group=group)
                assert x[0] == rank
                x = np.array([world.rank])
                dist.broadcast(x, group_src=place, group=group)
                assert x[0] == rank
            assert group.comm.size == count


def test_ranks_are_checked_everywhere(world):
    x = np.ones(1)
    calls = [
        lambda **who: dist.broadcast(x, **who),
        lambda **who: dist.scatter(x, None, **who),
        lambda **who: dist.broadcast_object_list([1], **who),
        lambda **who: dist.recv(x, **who),
        lambda **who: dist.irecv(x, **who),
        lambda src=None, group_src=None: dist.reduce(x, src, group_dst=group_src),
        lambda src=None, group_src=None: dist.gather(x, None, src, group_dst=group_src),
        lambda src=None, group_src=None: dist.send(x, src, group_dst=group_src),
        lambda src=None, group_src=None: dist.isend(x, src, group_dst=group_src),
        lambda src=None, group_src=None: dist.P2POp(dist.isend, x, src, group_peer=group_src),
        lambda src=None, group_src=None: dist.gather_object(x, None, src, group_dst=group_src),
        lambda src=None, group_src=None: dist.send_object_list([x], src, group_dst=group_src),
    ]
    for call in calls:
        for bad in (world.size, -1, 10**12, "0", 0.5, [0]):
            with pytest.raises(ValueError, match="not part of"):
                call(src=bad)
            with pytest.raises(ValueError, match="not part of"):
                call(group_src=bad)
        with pytest.raises(ValueError, match="both group_rank and global_rank"):
            call(src=0, group_src=0)
    for call in (lambda: dist.broadcast(x), lambda: dist.reduce(x), lambda: dist.send(x), lambda: dist.isend(x)):
        with pytest.raises(ValueError, match="Must specify global_rank or group_rank"):
            call()
    for bad in (world.size, -1):
        with pytest.raises(ValueError):
            dist.get_group_rank(dist.group.WORLD, bad)
        with pytest.raises(ValueError):
            dist.get_global_rank(dist.group.WORLD, bad)
    assert total(None, 1) == world.size


def test_non_members_are_warned_and_get_nothing(world):
    group = dist.new_group([0])
    dist.new_group([world.size - 1])  # torch loses its way here
    if world.rank != 0:
        for name, call in calls(group).items():
            with pytest.warns(UserWarning, match=f"on global rank {world.rank} which does not belong"):
                assert call() == (-1 if name.startswith("recv") else None), name
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.all_reduce(np.ones(2), group=group, async_op=True) is None
        dist.destroy_process_group(group)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert total(group, 3) == 3


@pytest.mark.ranks(2)
def test_the_librarys_limit_is_named(world):
    if "MPICH" not in lazy.MPI.Get_library_version():
        pytest.skip("only MPICH has a limit that can be reached")
    fillers = []
    with pytest.raises(lazy.MPI.Exception):
        while True:
            fillers.append(lazy.MPI.COMM_SELF.Dup())
    for _ in range(8):  # room for two groups of three communicators, and not for a third
        fillers.pop().Free()
    count = dist.get_pg_count()
    for _ in range(3):
        groups = [dist.new_group(), dist.new_group()]
        text = rf"communicators.* {count + 2} groups are alive .*destroy_process_group"
        with pytest.raises(dist.DistError, match=text):
            dist.new_group()
        assert dist.get_pg_count() == count + 2
        assert total(groups[1], 1) == total(None, 1) == world.size
        for group in groups:
            dist.destroy_process_group(group)
    for filler in fillers:
        filler.Free()


@pytest.mark.ranks(3)
def test_making_and_destroying_does_not_grow(world, monkeypatch):
    liveness = this_job.current().liveness
    monkeypatch.setattr(liveness, "_retired", deque(maxlen=10))
    xs = np.ones(3), np.ones(300_000)

    def cycles(number):
        for index in range(number):
            group = dist.new_group()
            dist.all_reduce(xs[index % 2], group=group)
            dist.destroy_process_group(group)

    def held():
        return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())

    cycles(15)
    gc.collect()
    gc.disable()  # what a group held is given back at once
    try:
        files, maps = held()
        known = len(liveness._links)
        cycles(25)
        assert held()[0] == files
        assert held()[1] <= maps + 4, "mappings of the allocator come and go"
        assert len(liveness._links) == known
    finally:
        gc.enable()


def test_layers_refuse_a_group_without_this_rank(world):
    """Over all ranks instead they would wait for those that work in their own group."""
    parameters = list(nn.Linear(2, 2).parameters())
    for make in (
        lambda: dist.DistributedDataParallel(nn.Linear(2, 2), process_group=NON_MEMBER),
        lambda: dist.ZeroRedundancyOptimizer(parameters, optimizer_class=optim.SGD, process_group=NON_MEMBER, lr=0.1),
        lambda: DiLoCo(parameters, period=2, process_group=NON_MEMBER),
        lambda: dist.SyncBatchNorm(2, process_group=NON_MEMBER)(np.ones((4, 2), np.float32)),
        lambda: allreduce_hook(NON_MEMBER, GradBucket(0, [], np.ones(2, np.float32), is_last=True)),
        lambda: Timeline("timeline.json", group=NON_MEMBER),
    ):
        with pytest.raises(ValueError, match="not a member"):
            make()

from __future__ import annotations

import gc
import itertools
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.faults import monitor
from mpiddp.mpi import cuda_aware, lazy
from mpiddp.mpi.link import Resource
from mpiddp.parallel import DiLoCo, GradBucket, Timeline, allreduce_hook

pytestmark = [pytest.mark.mpi, pytest.mark.core]

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def total(group, x):
    x = np.array([float(x)])
    dist.all_reduce(x, group=group)
    return x[0]


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
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group()


def test_without_a_gpu_mpi_is_not_asked_about_them(world, monkeypatch):
    """MPICH 3.4 ends a process that asks."""
    monkeypatch.setattr(cuda_aware, "_answer", lambda library: pytest.fail("asked"))
    dist.destroy_process_group()
    dist.init_process_group()


def test_every_subset(world):
    for count in range(1, world.size + 1):
        for ranks in itertools.permutations(range(world.size), count):
            group = dist.new_group(list(ranks), sort_ranks=False)
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
                dist.broadcast(x, src=rank, group=group)
                assert x[0] == rank
                x = np.array([world.rank])
                dist.broadcast(x, group_src=place, group=group)
                assert x[0] == rank
            assert group.comm.size == count
            dist.destroy_process_group(group)


def test_ranks_are_sorted_by_default(world):
    group = dist.new_group(list(reversed(range(world.size))))
    assert dist.get_process_group_ranks(group) == list(range(world.size))
    dist.destroy_process_group(group)


def test_none_is_everybody_and_equal_groups_are_distinct(world):
    one, other = dist.new_group(), dist.new_group(range(world.size))
    assert one is not other
    assert one != other
    assert total(one, 1) == total(other, 1) == world.size
    dist.destroy_process_group(one)
    assert total(other, 1) == world.size
    dist.destroy_process_group(other)


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ([], TypeError),
        ("01", TypeError),
        (0, TypeError),
        ([0, 0], ValueError),
        ([-1], ValueError),
        ([99], ValueError),
        ([0.0], TypeError),
        ([True], TypeError),
        ([None], TypeError),
    ],
    ids=lambda value: None if isinstance(value, type) else repr(value),
)
def test_bad_ranks(world, ranks, error):
    count = dist.get_pg_count()
    for call in (dist.new_group, lambda given: dist.new_subgroups_by_enumeration([given])):
        with pytest.raises(error):
            call(ranks)
    with pytest.raises(error):
        dist.split_group(None, [ranks])
    assert dist.get_pg_count() == count
    assert total(None, 1) == world.size


@pytest.mark.parametrize("timeout", ["1", [1], True], ids=str)
def test_bad_timeout(world, timeout):
    for call in (dist.new_group, dist.barrier):
        with pytest.raises(TypeError, match="timeout"):
            call(timeout=timeout)
    assert total(None, 1) == world.size


def test_bad_backend(world):
    with pytest.raises(ValueError, match="Unknown backend"):
        dist.new_group(backend="smoke")


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


def test_numpy_integers_are_ranks(world):
    x = np.array([world.rank])
    dist.broadcast(x, src=np.int64(0))
    assert x[0] == 0
    group = dist.new_group([np.int32(0)])
    assert (group == NON_MEMBER) == (world.rank != 0)
    if world.rank == 0:
        dist.destroy_process_group(group)


def test_non_members_are_warned_and_get_nothing(world):
    group = dist.new_group([0])
    second = dist.new_group([world.size - 1])  # torch loses its way here
    if world.rank != 0:
        x, xs = np.ones(2), [np.ones(2)]
        calls = [
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.all_reduce(x, group=group, async_op=True),
            lambda: dist.reduce(x, 0, group=group),
            lambda: dist.broadcast(x, 0, group=group),
            lambda: dist.all_gather(xs, x, group=group),
            lambda: dist.all_gather_single(x, x, group=group),
            lambda: dist.gather(x, group=group),
            lambda: dist.scatter(x, group=group),
            lambda: dist.reduce_scatter(x, xs, group=group),
            lambda: dist.reduce_scatter_single(x, x, group=group),
            lambda: dist.all_to_all(xs, xs, group=group),
            lambda: dist.all_to_all_single(x, x, group=group),
            lambda: dist.barrier(group=group),
            lambda: dist.all_gather_object([None], 1, group=group),
            lambda: dist.gather_object(1, group=group),
            lambda: dist.broadcast_object_list([1], 0, group=group),
            lambda: dist.scatter_object_list([1], group=group),
            lambda: dist.send(x, 0, group=group),
            lambda: dist.isend(x, 0, group=group),
            lambda: dist.irecv(x, 0, group=group),
            lambda: dist.send_object_list([1], 0, group=group),
        ]
        for call in calls:
            with pytest.warns(UserWarning, match=f"on global rank {world.rank} which does not belong"):
                assert call() is None
        with pytest.warns(UserWarning):
            assert dist.recv(x, 0, group=group) == -1
        with pytest.warns(UserWarning):
            assert dist.recv_object_list([1], 0, group=group) == -1
        dist.destroy_process_group(group)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert total(group, 3) == 3
        dist.destroy_process_group(group)
    if second != NON_MEMBER:
        dist.destroy_process_group(second)


def test_destroyed_group(world):
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        dist.all_reduce(np.ones(1), group=group)
    with pytest.raises(ValueError):
        dist.destroy_process_group(group)
    for wrong in ("WORLD", 3, [0]):
        with pytest.raises(TypeError, match="group"):
            dist.all_reduce(np.ones(1), group=wrong)
        with pytest.raises(TypeError):
            dist.destroy_process_group(wrong)
    dist.destroy_process_group(NON_MEMBER)
    assert total(None, 1) == world.size


def test_a_group_with_pending_operations_is_not_destroyed(world):
    ended = []

    class Kept(Resource):
        def __init__(self, link):
            self._link = link

        def close(self):
            ended.append(self._link)

    group = dist.new_group()
    group.link.resource(Kept)
    x = np.zeros(1)
    receive = dist.irecv(x, world.rank, group=group)
    with pytest.raises(dist.DistError, match="not finished"):
        dist.destroy_process_group(group)
    assert not ended
    dist.isend(np.ones(1), world.rank, group=group).wait()
    receive.wait()
    dist.destroy_process_group(group)
    assert ended == [group.link]


def test_subgroups(world):
    for size in range(1, world.size + 1):
        if world.size % size:
            with pytest.raises(ValueError, match="divisible"):
                dist.new_subgroups(size)
            continue
        mine, all_of_them = dist.new_subgroups(size)
        first = world.rank // size * size
        assert len(all_of_them) == world.size // size
        assert dist.get_process_group_ranks(mine) == list(range(first, first + size))
        assert [each is mine for each in all_of_them].count(True) == 1
        assert all(each == NON_MEMBER for each in all_of_them if each is not mine)
        assert total(mine, world.rank) == sum(range(first, first + size))
        dist.destroy_process_group(mine)
    for wrong in (0, -1, world.size + 1, 1.5):
        with pytest.raises(ValueError):
            dist.new_subgroups(wrong)
    mine, _ = dist.new_subgroups()  # those of a node
    assert dist.get_world_size(mine) == world.size
    dist.destroy_process_group(mine)


def test_subgroups_of_a_group(world):
    ranks = list(reversed(range(world.size - world.size % 2 or 1)))
    part = dist.new_group(ranks, sort_ranks=False)
    if part == NON_MEMBER:
        with pytest.warns(UserWarning):
            assert dist.new_subgroups(2, part) == (None, [])
        return
    size = min(2, len(ranks))
    mine, every = dist.new_subgroups(size, part)
    place = ranks.index(world.rank) // size
    assert every[place] is mine
    assert dist.get_process_group_ranks(mine) == ranks[place * size : place * size + size]
    dist.destroy_process_group(mine)
    dist.destroy_process_group(part)


def test_subgroups_by_enumeration(world):
    lists = [[world.size - 1], list(range(world.size - 1))] if world.size > 1 else [[0]]
    mine, all_of_them = dist.new_subgroups_by_enumeration(lists)
    assert len(all_of_them) == len(lists)
    assert total(mine, 1) == (1 if world.rank == world.size - 1 else world.size - 1)
    dist.destroy_process_group(mine)
    nobody, all_of_them = dist.new_subgroups_by_enumeration([[0]])
    assert (nobody is None) == (world.rank != 0)
    if world.rank == 0:
        dist.destroy_process_group(nobody)
    else:
        assert all_of_them == [NON_MEMBER]
    count = dist.get_pg_count()
    with pytest.raises(ValueError, match="Rank 0 has appeared in both subgroup"):
        dist.new_subgroups_by_enumeration([[0], list(range(world.size))])
    with pytest.raises(ValueError, match="empty"):
        dist.new_subgroups_by_enumeration([])
    assert dist.get_pg_count() == count, "a group was made before the lists were checked"


def test_split(world):
    ranks = list(reversed(range(world.size)))
    parent = dist.new_group(ranks, sort_ranks=False)
    parts = [[0], list(range(1, world.size))] if world.size > 1 else [[0]]
    mine = dist.split_group(parent, parts, group_desc="half")
    expected = [ranks[place] for place in parts[0 if dist.get_rank(parent) == 0 else 1]]
    assert dist.get_process_group_ranks(mine) == expected
    assert mine.group_desc == "half"
    assert total(mine, world.rank) == sum(expected)
    dist.destroy_process_group(mine)
    out = dist.split_group(parent, [[0]])
    assert (out is None) == (dist.get_rank(parent) != 0)
    if out is not None:
        dist.destroy_process_group(out)
    with pytest.raises(ValueError, match="share no rank"):
        dist.split_group(parent, [[0], [0]])
    with pytest.raises(ValueError, match="empty"):
        dist.split_group(parent, [])
    dist.destroy_process_group(parent)


def test_ranks_that_disagree_hear_of_it(world):
    if world.size == 1:
        return
    ranks = [0] if world.rank == world.size - 1 else [0, 1]
    with pytest.raises(
        dist.MismatchError, match=rf"rank 0 calls .*\[\[0, 1\]\], rank {world.size - 1} calls .*\[\[0\]\];"
    ):
        dist.new_group(ranks)
    assert total(None, 1) == world.size


def test_local_synchronization(world):
    count = dist.get_pg_count()
    groups = []
    # Overlapping chains and pairs, of which every rank makes only its own: torch deadlocks here.
    lists = [[rank, rank + 1] for rank in range(world.size - 1)]
    lists += [[0, world.size - 1]] * (world.size > 2) + [list(range(world.size))]
    for ranks in lists:
        if world.rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert dist.get_process_group_ranks(group) == ranks
            assert total(group, world.rank) == sum(ranks)
            groups.append(group)
        elif world.rank % 2:
            assert dist.new_group(ranks, use_local_synchronization=True) is None
    assert dist.get_pg_count() == count + len(groups)
    for group in groups:
        assert total(group, 1) == dist.get_world_size(group)
        dist.destroy_process_group(group)


def test_destroy_everything_and_begin_again(world):
    groups = [dist.new_group(), dist.new_group([0])]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert groups[0].link.closed
    with pytest.raises(AssertionError, match="cannot be None"):
        dist.destroy_process_group()
    for call in (dist.get_rank, dist.barrier, lambda: dist.all_reduce(np.ones(1)), dist.new_group):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()
    dist.init_process_group()
    assert dist.get_pg_count() == 1
    assert total(None, 1) == world.size


def test_init_with_a_communicator(world):
    dist.destroy_process_group()
    part = lazy.MPI.COMM_WORLD.Split(world.rank % 2, -world.rank)
    dist.init_process_group(comm=part)
    try:
        assert dist.get_world_size() == part.size
        assert dist.get_rank() == part.rank
        assert dist.group.WORLD.comm == part
        assert total(None, 1) == part.size
        x = np.array([dist.get_rank()])
        dist.broadcast(x, src=part.size - 1)
        assert x[0] == part.size - 1
        # `src` and new_group mean ranks of the default group, as in any world.
        group = dist.new_group([part.size - 1])
        assert (group == NON_MEMBER) == (part.rank != part.size - 1)
    finally:
        dist.destroy_process_group()
        part.Free()
        dist.init_process_group()
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
        with pytest.raises(
            dist.DistError, match=rf"communicators.* {count + 2} groups are alive .*destroy_process_group"
        ):
            dist.new_group()
        assert dist.get_pg_count() == count + 2
        assert total(groups[1], 1) == total(None, 1) == world.size
        for group in groups:
            dist.destroy_process_group(group)
    for filler in fillers:
        filler.Free()


@pytest.mark.ranks(1, 2)
def test_many_groups_leak_nothing(world):
    # MPICH has 2,046 communicators, so that even one leaked by each group would show.
    for number in range(1000 if world.size == 1 else 50):
        group = dist.new_group()
        if number % 100 == 0:
            assert total(group, 1) == world.size
        dist.destroy_process_group(group)
    assert total(None, 1) == world.size


@pytest.mark.ranks(3)
def test_making_and_destroying_does_not_grow(world, monkeypatch):
    liveness = monitor.current().liveness
    monkeypatch.setattr(liveness, "_retired", deque(maxlen=min(liveness._retired.maxlen, 30)))
    x = np.ones(3)

    def cycles(number):
        for _ in range(number):
            group = dist.new_group()
            dist.all_reduce(x, group=group)
            dist.destroy_process_group(group)

    def held():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())

    cycles(40)
    files, maps = held()
    known = len(liveness._links)
    cycles(60)
    assert held()[0] == files
    assert held()[1] <= maps + 4, "mappings of the allocator come and go"
    assert len(liveness._links) == known


@pytest.mark.parametrize(
    "make",
    [
        lambda: dist.DistributedDataParallel(nn.Linear(2, 2), process_group=NON_MEMBER),
        lambda: dist.ZeroRedundancyOptimizer(
            nn.Linear(2, 2).parameters(), optimizer_class=optim.SGD, process_group=NON_MEMBER, lr=0.1
        ),
        lambda: DiLoCo(nn.Linear(2, 2).parameters(), period=2, process_group=NON_MEMBER),
        lambda: dist.SyncBatchNorm(2, process_group=NON_MEMBER)(np.ones((4, 2), np.float32)),
        lambda: allreduce_hook(NON_MEMBER, GradBucket(0, [], np.ones(2, np.float32), is_last=True)),
        lambda: Timeline("timeline.json", group=NON_MEMBER),
    ],
    ids=["ddp", "zero", "average", "batch norm", "hook", "timeline"],
)
def test_layers_refuse_a_group_without_this_rank(world, make):
    """Over all ranks instead they would wait for those that work in their own group."""
    with pytest.raises(ValueError, match="not a member"):
        make()

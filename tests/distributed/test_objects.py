import numpy as np
import pytest

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]

OBJECTS = [None, 0, "text", {"a": [1, 2]}, (), b"\0" * 100_000, {1.5, 2}, [np.arange(3).tolist()] * 50]


def of(rank, number):
    return {"rank": rank, "object": OBJECTS[(rank + number) % len(OBJECTS)]}


def test_all_gather_object(world):
    for number in range(len(OBJECTS)):
        found = [None] * (world.size + 2)
        assert dist.all_gather_object(found, of(world.rank, number)) is None
        assert found == [of(rank, number) for rank in range(world.size)] + [None, None]
    with pytest.raises(IndexError):
        dist.all_gather_object([None] * (world.size - 1), 1)
    with pytest.raises(TypeError):
        dist.all_gather_object((None,) * world.size, 1)
    arrays = [None] * world.size  # of shapes that nobody knows
    dist.all_gather_object(arrays, np.full((world.rank, 2), world.rank))
    assert [x.shape for x in arrays] == [(rank, 2) for rank in range(world.size)]


def test_gather_object(world):
    for root in range(world.size):
        found = [None] * world.size if world.rank == root else None
        dist.gather_object(of(world.rank, 1), found, dst=root)
        assert found is None or found == [of(rank, 1) for rank in range(world.size)]
    text = "must be specified on" if world.rank == 0 else "must NOT be specified on"
    with pytest.raises(ValueError, match=text):
        dist.gather_object(1, None if world.rank == 0 else [None] * world.size)


def test_broadcast_object_list(world):
    for root in range(world.size):
        given = [of(root, number) for number in range(3)]
        found = list(given) if world.rank == root else [None] * 3
        dist.broadcast_object_list(found, group_src=root)
        assert found == given
    for wrong in ([], None, (1,)):
        with pytest.raises((ValueError, TypeError)):
            dist.broadcast_object_list(wrong, 0)


def test_broadcast_of_lists_of_unequal_length(world):
    found = [1, 2] if world.rank == 0 else [None]
    if world.rank == 0:
        dist.broadcast_object_list(found, 0)
    else:
        with pytest.raises(ValueError, match="rank 0 sent 2 objects, but this rank's object_list has 1"):
            dist.broadcast_object_list(found, 0)
    dist.barrier()


def test_scatter_object_list(world):
    for root in range(world.size):
        given = [of(rank, 2) for rank in range(world.size)]
        found = [None, "kept"]
        dist.scatter_object_list(found, given if world.rank == root else None, src=root)
        assert found == [of(world.rank, 2), "kept"]
    with pytest.raises(ValueError, match="size at least 1"):
        dist.scatter_object_list([], [1] * world.size)


@pytest.mark.mpi(min_size=2)
def test_send_and_receive(world):
    senders = list(range(1, world.size))
    for way, sources in (({"dst": 0}, senders), ({"group_dst": 0}, [None] * len(senders))):  # and from any rank
        found = [[None, None] for _ in senders]
        if world.rank == 0:
            seen = [dist.recv_object_list(each, src=source) for each, source in zip(found, sources, strict=True)]
            assert found == [[of(sender, 0), sender] for sender in seen]
            assert sorted(seen) == senders and (None in sources or seen == senders)
        else:
            dist.send_object_list([of(world.rank, 0), world.rank], **way)
        dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_another_number_of_objects(world):
    if world.rank == 0:
        with pytest.raises(ValueError, match="rank 1 sent 3 objects, object_list has 1 elements"):
            dist.recv_object_list([None], src=1)
        found = [None]
        dist.recv_object_list(found, src=1)
        assert found == ["right"]
    if world.rank == 1:
        dist.send_object_list([1, 2, 3], dst=0)
        dist.send_object_list(["right"], dst=0)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_pickled_was_not_called(world):
    group = dist.new_group([0, 1])
    if world.rank == 0:
        with pytest.raises((TypeError, AttributeError)):
            dist.broadcast_object_list([lambda: 1], 0, group)
        submitted = dist.barrier(group, async_op=True)
        dist.send(np.zeros(1), 1)
        with pytest.raises(dist.MismatchError, match="rank 0 calls barrier #1, rank 1 calls broadcast_object_list #1"):
            submitted.wait()
    if world.rank == 1:
        dist.recv(np.zeros(1), 0)
        with pytest.raises(dist.MismatchError):
            dist.broadcast_object_list([None], 0, group)
    dist.barrier()

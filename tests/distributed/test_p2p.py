"""Point to point: by tag, from any source, to oneself, too long, too short, of another dtype."""

from unittest import mock

import numpy as np
import pytest
from harness.inputs import CLASSES, DTYPES, SHAPES, draw, dtype_of, finish, same
from harness.tiers import thinned

import mpiddp as dist
from mpiddp.autograd import Tensor
from mpiddp.errors import ArrayError
from mpiddp.mpi import lazy, p2p, requests

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.core]

SIZES = [0, 1, 10, 100, 1000, 12_345, 100_000, 1_000_000]


def ring(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", thinned(DTYPES, *CLASSES))
def test_send_recv(world, dtype):
    dtype = dtype_of(dtype)
    for shape in SHAPES:
        xs = draw(world.rng, world.size, shape, dtype)
        x = np.zeros(shape, dtype)
        right, left = ring(world)
        if world.rank % 2 == 0:
            assert dist.send(xs[world.rank], right) is None
            assert dist.recv(x, left) == left
        else:
            assert dist.recv(x, left) == left
            dist.send(xs[world.rank], right)
        assert same(x, xs[left])


def test_from_any_source(world):
    if world.rank == 0:
        senders = []
        posted = [(x, dist.irecv(x, tag=5)) for x in map(np.zeros, [2] * (world.size - 1))]
        for x, work in posted:
            senders.append(dist.recv(x, tag=4))
            assert (x == senders[-1]).all()
            work.wait()
            senders.append(work.source_rank())
            assert (x == senders[-1]).all()
        assert sorted(senders[::2]) == sorted(senders[1::2]) == list(range(1, world.size))
    else:
        for tag in (4, 5):
            dist.isend(np.full(2, float(world.rank)), group_dst=0, tag=tag).wait()
    dist.barrier()


@pytest.mark.parametrize("way", ["recv", "irecv", "any"])
def test_wrong_message_is_an_error_and_the_next_is_right(world, way):
    right, left = ring(world)
    for size in SIZES:
        faults = {rf"{size + 1} elements \({8 * size + 8} bytes\).* {size} \({8 * size} ": np.ones(size + 1)}
        faults |= {f"{name}, but its buffer is float64": np.ones(size, name) for name in ("int64", "float32")}
        works = [dist.isend(sent, right) for sent in (*faults.values(), np.full(size, 2.0))]
        x = np.zeros(size)
        for text in faults:
            with pytest.raises(ArrayError, match=text):
                if way == "irecv":
                    dist.irecv(x, left).wait()
                else:
                    dist.recv(x, left if way == "recv" else None)
            assert (x == 0).all()
        dist.recv(x, left)
        assert (x == 2).all()
        finish(works)
    work = dist.isend(np.zeros(1, "V8"), right)
    with pytest.raises(ArrayError, match=r"buffer has 1 \(0 bytes\)"):
        dist.recv(np.zeros(1, "V0"), left)
    finish([work])


def test_batch_and_a_message_to_oneself_that_nobody_awaits_are_refused(world):
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send(np.ones(2), world.rank)
    op = dist.P2POp(dist.isend, np.ones(1), 0)
    assert (op.peer, op.group_peer, op.tag, op.group) == (0, 0, 0, dist.group.WORLD)
    for bad in ([], [1], "x", None, [op, None]):
        with pytest.raises((ValueError, IndexError)):
            dist.batch_isend_irecv(bad)
    other = dist.new_group()
    with pytest.raises(ValueError, match="same group"):
        dist.batch_isend_irecv([op, dist.P2POp(dist.isend, np.ones(1), 0, other)])
    right = dist.P2POp(dist.irecv, np.ones(1), 0, other)
    for tensor, tag in ((np.ones(4)[::2], 0), (None, 0), (np.ones(1), -1)):
        with pytest.raises((TypeError, ValueError)):
            dist.batch_isend_irecv([right, dist.P2POp(dist.isend, tensor, 0, other, tag)])
    dist.destroy_process_group(other)  # nothing of it has begun
    with pytest.raises(ValueError, match="not a member"):
        dist.P2POp(dist.isend, np.ones(1), 0, dist.GroupMember.NON_GROUP_MEMBER)


def test_random_messages(world):
    """Every rank sends to every rank, in random sizes, dtypes and tags; receivers post in another random order.

    A shorter message fills the beginning.
    """
    ranks = list(reversed(range(world.size)))
    group = dist.new_group(ranks, sort_ranks=False)
    plan = [
        (
            int(world.rng.integers(world.size)),
            int(world.rng.integers(world.size)),
            int(world.rng.integers(3)),
            int(world.rng.choice([0, 1, 17, 1000, 20_000, 100_000])),
            str(world.rng.choice(["float32", "int16", "bool"])),
        )
        for _ in range(250)
    ]
    mine = np.random.default_rng(world.rank)
    works, receives = [], []
    incoming = [(number, each) for number, each in enumerate(plan) if each[1] == world.rank]
    outgoing = [(number, each) for number, each in enumerate(plan) if each[0] == world.rank]
    while incoming or outgoing:
        if outgoing and (not incoming or mine.random() < 0.5):
            number, (_, to, tag, size, dtype) = outgoing.pop(0)
            x = np.full(size, number, np.float64).astype(dtype)
            works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to, group, tag)])
        else:
            # In order for each sender and tag, otherwise in any.
            firsts = {(each[0], each[2]): place for place, (_, each) in reversed(list(enumerate(incoming)))}
            number, (source, _, tag, size, dtype) = incoming.pop(firsts[sorted(firsts)[mine.integers(len(firsts))]])
            x = np.zeros(size + int(mine.integers(3)), dtype)
            receive = dist.irecv(x, group=group, group_src=ranks.index(source), tag=tag)
            receives.append((x, receive, number, size, source))
        if mine.random() < 0.1 and receives:
            receives[0][1].is_completed()
    for index in mine.permutation(len(receives)):
        x, receive, number, size, source = receives[index]
        assert receive.wait()
        assert (receive.count(), receive.source_rank()) == (size, source)
        assert same(x[:size], np.full(size, number, np.float64).astype(x.dtype)) and not x[size:].any()
    finish(works)
    dist.destroy_process_group(group)


def test_a_tensor_that_lies_transposed_is_sent_in_order():
    """A linear layer's output is a transposed view; for reading only, that is no fault."""
    tensor = Tensor(np.arange(6.0).reshape(2, 3).T)
    received = np.zeros((3, 2))
    works = [dist.isend(tensor, dist.get_rank()), dist.irecv(received, dist.get_rank())]
    finish(works)
    np.testing.assert_array_equal(received, tensor.data)
    with pytest.raises(ArrayError, match="C-contiguous"):
        dist.all_reduce(tensor)


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_group_that_is_aborted_raise_and_leave_nothing(world, group, monkeypatch):
    group._link.abort(dist.DistError("it is gone"))
    for polls in (False, True):
        monkeypatch.setattr(group._mailbox, "polls", polls)
        for call in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(dist.DistError, match="it is gone"):
                call(np.ones(2), (world.rank + 1) % world.size, group)
    assert requests.pending == 0


def test_a_receive_whose_message_cannot_be_taken_ends(world, group, monkeypatch):
    """It is not the first one's."""
    works = [dist.irecv(np.empty(4), world.rank, group, tag=tag) for tag in (9, 0)]
    dist.isend(np.ones(4), world.rank, group)
    monkeypatch.setattr(p2p.Message, "accept", mock.Mock(side_effect=lazy.MPI.Exception(lazy.MPI.ERR_OTHER)))
    for work in reversed(works):
        with pytest.raises(lazy.MPI.Exception):
            work.wait(timeout=5)
    monkeypatch.setattr(group._monitor, "translate", translate := mock.Mock())
    monkeypatch.setattr(group._mailbox, "polls", True)
    monkeypatch.setattr(group._mailbox, "_transport", mock.Mock(Isend=mock.Mock(side_effect=lazy.MPI.Exception(1))))
    with pytest.raises(lazy.MPI.Exception):
        dist.isend(np.ones(4), world.rank, group)
    assert requests.pending == 0 and translate.called


@pytest.mark.mpi(min_size=2)
def test_a_message_that_nobody_received_ends_with_its_group(world):
    """One to oneself, because others on a node are not MPI's."""
    for number in range(2):
        group, x = dist.new_group(range(world.size)), np.zeros(1)
        dist.isend(x + number, world.rank, group, tag=dist.group.WORLD._mailbox.max_tag).wait()
        if number:
            dist.recv(x, world.rank, group, tag=dist.group.WORLD._mailbox.max_tag)
            assert x == 1
        dist.destroy_process_group(group)

"""Blocks of a node's ranks: short ones go through eager buffers, long ones by messages, in one call."""

import numpy as np
import pytest

import mpiddp.distributed as dist
from mpiddp.shm.eager import EagerBuffers

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = (0, 3, 4_000, 30_000)
"""Elements of 4 bytes; the last do not fit into the buffers."""


def block(sender, receiver, count):
    return np.arange(count, dtype=np.float32) + 7 * sender + receiver


def count_of(turn, sender, receiver):
    return SIZES[(turn + sender + 2 * receiver) % len(SIZES)]


def everything(world, turn, *, same=False, **how):
    """Make all calls, with blocks of another size between each two ranks, and check them."""
    me, ranks = world.rank, range(world.size)

    def between(sender, receiver):
        return block(sender, receiver, SIZES[turn % len(SIZES)] if same else count_of(turn, sender, receiver))

    def calls():
        for root in {0, world.size - 1}:
            outputs = [np.zeros_like(between(rank, root)) for rank in ranks] if me == root else None
            yield dist.gather(between(me, root), outputs, root, **how)
            assert_equal(outputs or [], [between(rank, root) for rank in ranks])
            x = np.zeros_like(between(root, me))
            yield dist.scatter(x, [between(root, rank) for rank in ranks] if me == root else None, root, **how)
            assert_equal([x], [between(root, me)])
        outputs, expected = zeros(between(rank, 0) for rank in ranks), [between(rank, 0) for rank in ranks]
        yield dist.all_gather(outputs, between(me, 0), **how)
        assert_equal(outputs, expected)
        inputs, expected = [between(me, rank) for rank in ranks], [between(rank, me) for rank in ranks]
        yield dist.all_to_all(outputs := zeros(expected), inputs, **how)
        assert_equal(outputs, expected)
        whole = np.zeros_like(np.concatenate(expected))
        splits = [[x.size for x in each] for each in (expected, inputs)]
        yield dist.all_to_all_single(whole, np.concatenate(inputs), *splits, **how)
        assert_equal([whole], [np.concatenate(expected)])

    for work in calls():
        if work is not None:
            work.wait()


def zeros(arrays):
    return [np.zeros_like(x) for x in arrays]


def assert_equal(found, expected):
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("async_op", [False, True])
def test_blocks_of_all_sizes(world, async_op):
    for turn in range(2 * len(SIZES)):
        everything(world, turn, same=turn % 2 == 0, async_op=async_op)


def test_short_blocks_are_no_messages_and_have_plans_that_stay(world, group, monkeypatch):
    if group._link.find(EagerBuffers) is None:
        pytest.skip("needs eager buffers")
    everything(world, 1, same=True, group=group)
    before = dict(group._plans._plans)
    with monkeypatch.context() as patched:
        patched.setattr(group._link, "now", None)
        patched.setattr(group._link, "later", None)
        everything(world, 1, same=True, group=group)
    assert group._plans._plans == before
    assert all(plan.run is not None for plan in before.values())


@pytest.mark.parametrize("refuse", [{0: "read", 1: "read"}, {0: "read"}, {1: "reads"}])
def test_a_block_that_its_receiver_cannot_read_is_sent(world, monkeypatch, refuse):
    """One rank cannot, or knows it before it offers anything; the others read what they are offered."""
    if world.rank in refuse:
        monkeypatch.setattr(EagerBuffers, refuse[world.rank], lambda *_: False)
    for async_op in (False, True):
        everything(world, 3, same=True, async_op=async_op)
        everything(world, 2, async_op=async_op)


def test_long_blocks_are_no_messages_where_they_can_be_read(world, group, monkeypatch):
    eager = group._link.find(EagerBuffers)
    dist.barrier(group)  # all ranks have told who they are
    if eager is None or not all(eager.reads(rank) for rank in range(world.size)):
        pytest.skip("needs eager buffers and cross-memory attach")
    monkeypatch.setattr(group._link, "later", Silent(group._link.later))
    everything(world, 3, same=True, group=group)


class Silent:
    """A communicator that polls, and sends nothing."""

    def __init__(self, comm):
        self.Iprobe = comm.Iprobe

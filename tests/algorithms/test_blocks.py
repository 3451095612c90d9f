"""Blocks of a node's ranks: short ones go through eager buffers, long ones by messages, in one call."""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from harness.collectives import UNEVEN, check

import mpiddp.distributed as dist
from mpiddp.algorithms import blocks as module, one_shot
from mpiddp.algorithms.ways import ATTACH, PIECES
from mpiddp.shm.eager import EagerBuffers

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = (0, 3, 4_000, 25_000, 140_000)
"""Elements of 4 bytes. Those before the last may go through the buffers, or be read in place; the last do not fit."""


@pytest.fixture
def mixed_ways(world, monkeypatch):
    """Let each rank draw how its blocks go in each call."""
    rng = np.random.default_rng(world.rank)
    monkeypatch.setattr(module.Blocks, "_next_way", lambda *_: rng.choice([PIECES, ATTACH]))


def everything(world, turn, *, same=False, **how):
    """Make all calls, with blocks of another size between each two ranks, and check them."""

    def shape(sender, receiver):
        return (SIZES[(turn if same else turn + sender + 2 * receiver) % len(SIZES)],)

    for name, root in itertools.product(UNEVEN, (0, world.size - 1)):
        check(world, name, np.dtype(np.float32), shape, how, root=root)


@pytest.mark.parametrize("async_op", [False, True])
def test_blocks_of_all_sizes(world, mixed_ways, async_op):
    for turn in [*range(2 * len(SIZES)), *[3] * 6]:
        everything(world, turn, same=turn % 2 == 0, async_op=async_op)


@pytest.mark.parametrize(("writing", "reading", "way"), [(1, 9, PIECES), (9, 1, ATTACH)])
def test_the_sender_takes_what_takes_less_time(world, group, eager_buffers, monkeypatch, writing, reading, way):
    dist.barrier(group)  # all ranks have told who they are
    readable = all(map(group._link[EagerBuffers].reads, range(world.size)))
    ticks, times = itertools.count(), {PIECES: writing, ATTACH: 0}

    def clock():
        return next(ticks) * times.get(sys._getframe(1).f_locals.get("way"), reading)

    monkeypatch.setattr(module, "perf_counter_ns", clock)
    for _ in range(30):
        dist.all_gather([np.empty(SIZES[3], "f4") for _ in range(world.size)], np.ones(SIZES[3], "f4"), group)
    *_, plan = group._plans._plans.values()
    assert plan.run.__self__.shots[0].shown.__self__._choice.way == (way if readable else PIECES)


def test_short_blocks_are_no_messages_and_have_plans_that_stay(world, group, eager_buffers, monkeypatch):
    everything(world, 1, same=True, group=group)
    before = dict(group._plans._plans)
    with monkeypatch.context() as patched:
        patched.setattr(group._link, "now", None)
        patched.setattr(group._link, "later", None)
        everything(world, 1, same=True, group=group)
    assert group._plans._plans == before
    assert all(plan.run is not None for plan in before.values())


@pytest.mark.parametrize("refuse", [{0: "read", 1: "read"}, {0: "read"}, {1: "reads"}])
def test_a_block_that_its_receiver_cannot_read_is_sent(world, mixed_ways, monkeypatch, refuse):
    """One rank cannot, or knows it before it offers anything; the others read what they are offered."""
    if world.rank in refuse:
        monkeypatch.setattr(EagerBuffers, refuse[world.rank], lambda *_: False)
    for async_op in (False, True):
        for turn in (3, 4):
            everything(world, turn, same=True, async_op=async_op)
        everything(world, 2, async_op=async_op)


def test_long_blocks_are_no_messages_where_they_can_be_read(world, group, monkeypatch):
    eager = group._link.find(EagerBuffers)
    dist.barrier(group)  # all ranks have told who they are
    if eager is None or not all(eager.reads(rank) for rank in range(world.size)):
        pytest.skip("needs eager buffers and cross-memory attach")
    monkeypatch.setattr(group._link, "later", SimpleNamespace(Iprobe=group._link.later.Iprobe))  # which sends nothing
    everything(world, 4, same=True, group=group)


def exchange(world, group, count):
    x = np.full(count * world.size, float(world.rank))
    dist.all_to_all_single(x, x, group=group)
    assert (x.reshape(world.size, count) == np.arange(world.size)[:, None]).all()


def test_sizes_are_told_again_after_long_arrays(world, group):
    """They tell of themselves in the same words."""
    for turn in range(12):
        for _ in range(turn % 5):
            exchange(world, group, 2)
        dist.all_reduce(x := np.ones(1 << 17), group=group)
        assert (x == world.size).all()


def test_sizes_are_told_again_after_an_interrupt(world, group, eager_buffers):
    exchange(world, group, 3)
    [plan] = group._plans._plans.values()
    blocks = plan.run.__self__.shots[0].shown.__self__
    for _ in range(4):
        exchange(world, group, 2)
    shown = blocks.shown["pieces"]
    blocks.shown["pieces"] = [each._replace(sizes=itertools.chain(each.sizes, map(interrupt, [0]))) for each in shown]
    with pytest.raises(KeyboardInterrupt):
        exchange(world, group, 3)
    one_shot._abandoned.clear()
    blocks.shown["pieces"] = shown
    for count in (2, 3):
        for _ in range(4):
            exchange(world, group, count)


def interrupt(_):
    raise KeyboardInterrupt

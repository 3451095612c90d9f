"""Eager buffers: ranks that run ahead, arrive late, call different things or leave, and short arrays of all kinds."""

import contextlib
import dataclasses
import gc
import itertools
import mmap
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from harness.collectives import check

import mpiddp as dist
from mpiddp.algorithms.one_shot import OneShot
from mpiddp.faults.calls import make_call
from mpiddp.mpi import lazy, operation
from mpiddp.shm import eager
from mpiddp.shm.eager import EagerBuffers
from mpiddp.shm.segment import address_of

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]
WORLD = SimpleNamespace(crowded=False)


def full(group):
    """Return how many numbers of float64 fill a buffer."""
    return eager.buffer_bytes(group.size()) // 8


@pytest.fixture
def group(eager_buffers, group):
    return group


@pytest.fixture
def begun(monkeypatch):
    """A list that grows by one with every round that any group begins."""
    rounds, begin = [], EagerBuffers.begin
    monkeypatch.setattr(EagerBuffers, "begin", lambda self, *args: rounds.append(1) or begin(self, *args))
    return rounds


def test_roots_that_run_ahead_overwrite_nothing_unread(world, group):
    """Broadcasts and reduces, in which not all ranks wait, in an order and with delays drawn from one seed."""
    rng = np.random.default_rng(5)
    delays = np.random.default_rng(100 + world.rank)
    works = []
    for number in range(600):
        root, count, kind = int(rng.integers(world.size)), int(rng.integers(1, 40)), int(rng.integers(5))
        if delays.random() < 0.05:
            time.sleep(delays.random() * 2e-3)
        x = np.full(count, number * 10.0 + world.rank)
        total = number * 10.0 * world.size + sum(range(world.size))
        async_op = bool(delays.random() < 0.3) if kind != 4 else False
        if kind <= 1:
            work, expected = dist.broadcast(x, root, group, async_op), number * 10.0 + root
        elif kind == 2:
            work = dist.reduce(x, root, group=group, async_op=async_op)
            expected = total if world.rank == root else number * 10.0 + world.rank
        elif kind == 3:
            work, expected = dist.all_reduce(x, group=group, async_op=async_op), total
        else:
            work, expected = dist.barrier(group), number * 10.0 + world.rank
        works.append((work, x, expected))
        if work is None:
            assert (x == expected).all(), (number, kind, root)
    for work, x, expected in works:
        if work is not None:
            work.wait()
        assert (x == expected).all()


@pytest.mark.parametrize(("buffers", "more"), [(1, -1), (1, 0), (1, 1), (5, -77)])
def test_at_the_length_of_a_buffer(world, group, buffers, more):
    count = buffers * full(group) + more
    for name in ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"):
        check(world, name, np.dtype(float), (count,), {"group": group, "algorithm": "one_shot"})


def test_a_wait_for_each_piece_is_one_wait(world, group):
    for _ in range(20):
        if world.rank == 0:
            time.sleep(1e-3)
        dist.all_reduce(np.ones(3 * full(group)), group=group, algorithm="one_shot")
        assert not operation.waiting and not group._link.busy


def ring(group):
    """Wait for a call that is not eager, and is no blocking one, which the watchdog would find."""
    dist.all_reduce(np.ones(9), group=group, async_op=True, algorithm="ring").wait()


def pieces(group, halves):
    dist.all_reduce(np.ones(halves * full(group) // 2), group=group, algorithm="one_shot")


def scattered(group, count):
    dist.reduce_scatter_single(np.empty(count), np.ones(count * group.size()), group=group)


# A call, which is another one on the odd rank, and both in the error.
DIFFERENT = {
    "short": (
        lambda g, odd: dist.all_reduce(np.ones(4), group=g) if odd else dist.barrier(g),
        "all_reduce #1 of 4 float64",
        "barrier #1",
    ),
    # One waits in its round and publishes its call late, the other has published first, or comes later.
    "ring": (lambda g, odd: ring(g) if odd else dist.barrier(g), "all_reduce by ring #1", "barrier #1"),
    "pieces": (lambda g, odd: pieces(g, 5 if odd else 3), r"all_reduce.* #1 of \d+", r"all_reduce.* #1 of \d+"),
    # Their first ones are of one length, and one rank would be done with all of its own.
    "equal first pieces": (
        lambda g, odd: pieces(g, 5 if odd else 4),
        r"all_reduce.* #1 of \d+",
        r"all_reduce.* #1 of \d+",
    ),
    # The rank that has nothing to scatter does not go on alone.
    "nothing": (lambda g, odd: scattered(g, 0 if odd else 2), "reduce_scatter.* of 0 ", r"reduce_scatter.* of \d"),
}


@pytest.mark.parametrize(
    ("name", "late_s", "check_s"), [*((name, 0, 0) for name in DIFFERENT), ("short", 0.05, 0), ("short", 0, 1.2)]
)
def test_different_calls_are_an_error_on_every_rank(world, group, monkeypatch, name, late_s, check_s):
    """Also on a rank that is slow to find out: the watchdog has looked twice by then, and does not end it."""
    call, one, other = DIFFERENT[name]
    monkeypatch.setattr(eager, "_CHECK_S", check_s or eager._CHECK_S)
    odd = world.rank == world.size - 1
    time.sleep(late_s * odd)
    started = time.monotonic()
    with pytest.raises(dist.MismatchError, match=f"(?s){one}.*{other}|{other}.*{one}"):
        call(group, odd)
    assert time.monotonic() - started < 5
    with pytest.raises(dist.MismatchError, match="cannot be used any more"):
        dist.barrier(group)
    dist.barrier()


@pytest.mark.parametrize("late", [False, True])
def test_a_root_that_does_not_wait_against_a_call_that_is_not_eager(world, group, late):
    """It has gone on before they come, or comes when they wait: all that learn of both calls raise."""
    if world.rank == 0:
        if late:
            dist.barrier()
        with pytest.raises(dist.MismatchError) if late else contextlib.nullcontext():
            dist.broadcast(np.ones(2), 0, group)
    if not late:
        dist.barrier()
    if world.rank != 0:
        with pytest.raises(dist.MismatchError, match=r"(?s)broadcast #1.*all_reduce by ring #1"):
            work = dist.all_reduce(np.ones(9), group=group, async_op=True, algorithm="ring")
            if late:
                dist.barrier()
            work.wait()
    dist.barrier()
    if world.rank == 0 and not late:
        with pytest.raises(dist.MismatchError, match=r"(?s)broadcast #1.*all_reduce by ring #1"):
            dist.destroy_process_group(group)


def test_who_is_ahead_finds_out_about_an_old_round(world, group):
    """The root of broadcasts goes on until it may not be further ahead; operations have the numbers of the group's."""
    dist.all_gather([np.empty(2) for _ in range(world.size)], np.ones(2), group)
    with pytest.raises(dist.MismatchError, match=r"(?s)broadcast #2 .*barrier #2"):
        if world.rank == 0:
            for _ in range(9):
                dist.broadcast(np.ones(2), 0, group)
        else:
            dist.barrier(group)
    dist.barrier()


def test_mpis_error_in_the_first_looks_is_told_as_a_later_one(world, group, monkeypatch):
    """Such as that of a rank that has died, which the job's failures make a `RankFailedError`."""
    spin, told = mock.Mock(side_effect=lazy.MPI.Exception(lazy.MPI.ERR_OTHER)), mock.Mock()
    monkeypatch.setattr(group._link.find(EagerBuffers).arrival, "happened", lambda: False)
    monkeypatch.setattr(group._link.find(EagerBuffers), "spin", spin)
    monkeypatch.setattr(group._monitor, "verify_failed", told)
    with pytest.raises(lazy.MPI.Exception) as caught:
        dist.all_reduce(np.ones(2), group=group)
    told.assert_called_once_with(1, caught.value)


def test_a_call_after_an_interrupted_one_is_not_taken_for_its_rest(world, group, monkeypatch):
    x = np.ones(2 * full(group))
    if world.rank == 0:

        def interrupt(happened, looks=0):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(group._link.find(EagerBuffers), "spin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(x, group=group, algorithm="one_shot")
        assert not operation.waiting and not group._link.busy
        dist.barrier()
    else:
        dist.barrier()
    with pytest.raises(dist.MismatchError, match=r"(?s)all_reduce.* #[12] of .*all_reduce.* #[12] of"):
        dist.all_reduce(x, group=group, algorithm="one_shot")
        dist.all_reduce(x, group=group, algorithm="one_shot")
    dist.barrier()


def interrupting(index, uses):
    """Return an index that raises when it is used once more than ``uses`` times."""
    return mock.MagicMock(**{"__index__.side_effect": [index] * uses + [InterruptedError]})


@pytest.mark.parametrize("stores", [0, 1])
def test_a_record_that_is_half_written_is_no_mismatch(stores):
    """A rank that is ahead stops between the stores of its next record, in the place of an old round's."""
    memory = mmap.mmap(-1, 2 * eager.region_bytes(SimpleNamespace(one_node=True, size=2)))
    ranks = [EagerBuffers(SimpleNamespace(rank=rank, size=2, later=None, world=WORLD), memory, 0) for rank in range(2)]
    rounds = [each.rounds((), np.dtype("u1")) for each in ranks]
    barrier, broadcast = (make_call(mock.Mock(), name, root=1).record for name in ("barrier", "broadcast"))
    for sequence in range(1, 5):
        for each, own in zip(ranks, rounds, strict=True):
            assert each.writable()
            each.begin(own, barrier.pack(sequence), None, None)
    assert ranks[1].writable()
    stopping = [dataclasses.replace(each, own_number=interrupting(each.own_number, stores)) for each in rounds[1]]
    with pytest.raises(InterruptedError):
        ranks[1].begin(stopping, broadcast.pack(5), None, None)
    compared = ranks[0].calls()
    assert [each[0][:2] for each in compared] == [(0, 4), (0, 3), (0, 2), (0, 1)]
    assert all(call[1:] == each[0][1:] for each in compared for call in each)


@pytest.mark.parametrize("ranks", range(2, eager.MAX_RANKS + 1))
def test_buffers_lie_apart_and_inside(ranks):
    link = SimpleNamespace(rank=ranks - 1, size=ranks, one_node=True, later=None, world=WORLD)
    memory = mmap.mmap(-1, ranks * eager.region_bytes(link))
    made = EagerBuffers(link, memory, 0)
    first = 8 * (made.position(eager.BLOCK_WORDS, 0, 0, 0) + 3 * ranks)  # behind the ranks' records and words
    starts = [address_of(row) for each in made.rounds((made.buffer_bytes,), np.dtype("u1")) for row in each.rows]
    begin = address_of(np.frombuffer(memory, "u1"))
    assert starts == sorted(starts) and starts[0] >= begin + first
    assert all(b - a == made.buffer_bytes for a, b in itertools.pairwise(starts))
    assert starts[-1] + made.buffer_bytes <= begin + len(memory)


def test_an_asynchronous_call_shows_its_array_at_once(world, group):
    """Others need not wait until this rank, which may wait for them elsewhere, waits for its Work."""
    x = np.ones(3)
    if world.rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        group.comm.Barrier()
        work.wait()
    else:
        dist.all_reduce(x, group=group)
        group.comm.Barrier()
    assert (x == world.size).all()


@pytest.mark.parametrize("dtype", ["U20000", "V80000", "M8[s]"])
def test_elements_longer_than_a_buffer(world, group, dtype):
    rows = [
        np.frombuffer(np.full(np.dtype(dtype).itemsize, 1 + rank, np.uint32), dtype, 1) for rank in range(world.size)
    ]
    rows = [np.array([chr(65 + rank) * 20000], dtype) for rank in range(world.size)] if dtype == "U20000" else rows
    gathered = np.empty((world.size, 1), dtype)
    dist.all_gather_single(gathered, rows[world.rank], group)
    assert gathered.tobytes() == b"".join(row.tobytes() for row in rows)
    x = rows[world.rank].copy()
    dist.broadcast(x, group=group, group_src=world.size - 1, algorithm="one_shot")
    assert x.tobytes() == rows[-1].tobytes()


@pytest.mark.core
@pytest.mark.ranks(3)
def test_messages_on_their_way_move_while_a_rank_waits(world, group):
    """The sender may be done with a message that has not left; the other comes only when he has it."""
    x = np.full(1 << 18, world.rank, np.uint8)
    if world.rank == 0:
        work = dist.isend(x, 1)
        dist.barrier(group)
        work.wait()
    else:
        if world.rank == 1:
            dist.recv(x, 0)
            assert (x == 0).all()
        dist.barrier(group)


def test_many_shapes_are_forgotten(group):
    def kept():
        return sum(type(each) is OneShot for each in gc.get_objects())

    before = kept()
    for count in range(600):
        x = np.ones(count, np.int16)
        dist.all_reduce(x, group=group)
        assert (x == group.size()).all()
    assert kept() <= before + 256


def test_what_is_asked_for_later_holds_for_calls_like_an_earlier_one(group, begun, choose):
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group)
    assert len(begun) == 2
    choose(ALGORITHM="all_reduce:ring")
    dist.all_reduce(x, group=group)
    assert len(begun) == 2
    assert (x == group.size() ** 3).all()


def test_where_stores_come_in_another_order_there_are_none(world, begun, monkeypatch):
    monkeypatch.setattr(eager, "ORDERED", False)
    made = dist.new_group()
    assert made._link.find(EagerBuffers) is None
    x = np.ones(3)
    dist.all_reduce(x, group=made)
    dist.barrier(made)
    assert (x == world.size).all() and not begun
    dist.destroy_process_group(made)

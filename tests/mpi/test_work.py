"""Work and Future; and programs in which ranks wait at different places, which torch allows."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from harness.random_program import RandomProgram

import mpiddp as dist
from mpiddp.distributed import debug
from mpiddp.mpi import operation, requests

pytestmark = [pytest.mark.mpi, pytest.mark.core]

Op = dist.ReduceOp


def test_work(world):
    x = np.ones(3)
    submitted = dist.all_reduce(x, async_op=True)
    assert submitted.result()[0] is x
    assert submitted.wait() is True
    assert submitted.wait(timedelta(seconds=1)) is True
    assert (submitted.is_completed(), submitted.is_success(), submitted.exception()) == (True, True, None)
    assert (submitted.result()[0] == world.size).all()
    with pytest.raises(RuntimeError):
        submitted.source_rank()
    submitted.synchronize()


def test_is_completed_ends_by_itself(world):
    for op, dtype in ((Op.SUM, np.float64), (Op.MAX, np.float32)):  # one step, and several
        x = np.full(1000, world.rank, dtype)
        submitted = dist.all_reduce(x, op, async_op=True)
        while not submitted.is_completed():
            pass
        assert (x == (world.size - 1 if op == Op.MAX else sum(range(world.size)))).all()


def test_future(world):
    x = np.ones(4)
    future = dist.all_reduce(x, async_op=True).get_future()
    seen = []
    doubled = future.then(lambda done: seen.append(1) or 2 * done.value()[0])
    more = doubled.then(lambda done: done.value() + 1)
    assert (more.wait() == 2 * world.size + 1).all()
    assert future.done()
    assert doubled.done()
    assert (future.value()[0] == world.size).all()
    assert (doubled.value() == 2 * world.size).all()
    assert seen == [1]
    assert future.then(lambda done: 5).wait() == 5  # of a future that is done


def test_future_before_its_value(world):
    receive = dist.irecv(np.zeros(1), world.rank)
    future = receive.get_future()
    assert not future.done()
    with pytest.raises(RuntimeError, match="not there yet"):
        future.value()
    with pytest.raises(RuntimeError):
        receive.source_rank()
    dist.isend(np.ones(1), world.rank).wait()
    assert future.wait()[0][0] == 1


def test_error_in_a_callback_surfaces_in_its_future_only(world):
    def fail(_):
        raise KeyError("mine")

    submitted = dist.barrier(async_op=True)
    future = submitted.get_future()
    failing = future.then(fail)
    after = failing.then(lambda done: done.value())
    assert submitted.wait()
    future.wait()
    with pytest.raises(KeyError, match="mine"):
        failing.wait()
    with pytest.raises(KeyError, match="mine"):
        failing.value()
    with pytest.raises(KeyError, match="mine"):
        after.wait()


def test_operations_in_a_callback(world):
    x, y = np.ones(2), np.ones(2)
    inner = []

    def again(_):
        inner.append(dist.all_reduce(y, async_op=True))
        dist.all_reduce(np.ones(1))

    dist.all_reduce(x, async_op=True).get_future().then(again).wait()
    inner[0].wait()
    assert (x == world.size).all()
    assert (y == world.size).all()


def test_error_surfaces_in_wait(world):
    x = np.zeros(1)
    receive = dist.irecv(x, world.rank)
    dist.isend(np.zeros(2), world.rank).wait()
    future = receive.get_future()
    with pytest.raises(dist.ArrayError):
        receive.wait()
    assert receive.is_completed()
    assert not receive.is_success()
    assert isinstance(receive.exception(), dist.ArrayError)
    with pytest.raises(dist.ArrayError):
        future.wait()


def test_wait_with_a_timeout(world):
    x = np.zeros(1)
    receive = dist.irecv(x, world.rank)
    for timeout in (0.05, timedelta(seconds=0.05), 0):
        began = time.monotonic()
        with pytest.raises(dist.DistTimeoutError, match=r"irecv .*\(Timed out\)"):
            receive.wait(timeout)
        assert time.monotonic() - began < 4
    assert not receive.is_completed()
    dist.isend(np.ones(1), world.rank).wait()
    assert receive.wait(5)
    assert x[0] == 1


def test_many_on_their_way(world):
    xs = [np.full(50, float(number)) for number in range(200)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    assert requests.pending > 0
    for index in np.random.default_rng(world.rank).permutation(len(works)):
        works[index].wait()
    assert all((x == number * world.size).all() for number, x in enumerate(xs))


def test_blocking_before_or_after_the_wait(world):
    """One rank waits before a blocking call, another after it: MPI's own calls would not end."""
    group = dist.new_group()
    for op in (Op.SUM, Op.MAX):
        for last in (False, True):
            a, b, c = (np.full(1000, float(value)) for value in (1, 2, 3))
            submitted = dist.all_reduce(a, op, group=group, async_op=True)
            if (world.rank == 0) ^ last:
                submitted.wait()
                dist.all_reduce(b, op)
                dist.barrier(group)
                dist.all_reduce(c, op, group=group)
            else:
                dist.all_reduce(b, op)
                dist.barrier(group)
                dist.all_reduce(c, op, group=group)
                submitted.wait()
            factor = world.size if op == Op.SUM else 1
            for x, value in ((a, 1), (b, 2), (c, 3)):
                assert (x == value * factor).all()
    dist.destroy_process_group(group)


def test_a_receive_is_open_while_a_group_is_made(world):
    x = np.zeros(100_000)
    receive = dist.irecv(x, (world.rank - 1) % world.size)
    group = dist.new_group()
    sent = dist.isend(np.ones(100_000), (world.rank + 1) % world.size)
    part = dist.split_group(group, [list(range(world.size))])
    if world.rank % 2:
        receive.wait()
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    for each in (receive, sent):
        each.wait()
    assert (x == 1).all()
    for each in (alone, part, group):
        dist.destroy_process_group(each)


@pytest.fixture
def level(request):
    debug.configure(request.param)
    debug.logger.setLevel(logging.WARNING)
    yield
    debug.configure("OFF")
    debug.logger.handlers.clear()
    debug.logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(("seed", "level"), [(0, "OFF"), (1, "OFF"), (2, "OFF"), (3, "DETAIL")], indirect=["level"])
def test_random_program(world, seed, level):
    program = RandomProgram(world.rank, world.size, world.rng, np.random.default_rng([world.rank, seed]))
    program.run(250)
    dist.barrier()
    program.destroy()


def exchange(kind, group):
    """Begin an operation that sends every block by itself, and return it, its results and the expected ones."""
    rank, size = group.rank(), group.size()
    rows = np.zeros((size, 8))
    blocks = 10.0 * rank + np.repeat(np.arange(size), 8).reshape(size, 8)
    if kind == "all_to_all":
        submitted = dist.all_to_all(list(rows), list(blocks), group, async_op=True)
        return submitted, rows[:, 0], 10.0 * np.arange(size) + rank
    if kind == "gather":
        submitted = dist.gather(blocks[0], list(rows) if rank == 0 else None, 0, group, async_op=True)
        return submitted, rows[:, 0], 10.0 * np.arange(size) * (rank == 0)
    submitted = dist.scatter(rows[0], list(blocks) if rank == 0 else None, 0, group, async_op=True)
    return submitted, rows[0], rank


@pytest.mark.parametrize("kind", ["all_to_all", "gather", "scatter"])
@pytest.mark.parametrize("reverse", [False, True])
def test_ring_beside_blocks(world, kind, reverse):
    """Both send when they are submitted, but one posts its receive then, and the other probes at its turn."""
    group, size = dist.new_group(timeout=20), world.size
    x, rows, block = np.full(8 * size, 1.0 + world.rank), np.zeros((size, 8)), np.zeros(8)
    begun = [exchange(kind, group)]
    how = {"group": group, "async_op": True, "algorithm": "ring"}
    rings = [
        lambda: (dist.all_reduce(x, **how), x, size * (size + 1) / 2),
        lambda: (dist.all_gather_single(rows, np.full(8, 1.0 * world.rank), **how), rows[:, 0], np.arange(size)),
        lambda: (
            dist.reduce_scatter_single(block, np.repeat(np.arange(size), 8) * 1.0, **how),
            block,
            size * world.rank,
        ),
    ]
    for ring in rings:
        begun += [ring(), exchange(kind, group)]
    for pending, found, expected in reversed(begun) if reverse else begun:
        pending.wait()
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    dist.destroy_process_group(group)


def test_future_by_hand(world):
    future = dist.Future()
    seen = []
    twice = future.then(lambda found: 2 * found.value())
    future.add_done_callback(lambda found: seen.append(found.value()))
    assert not future.done() and not twice.done()
    with pytest.raises(RuntimeError, match="not there yet"):
        future.value()
    future.set_result(21)
    assert future.done() and future.wait() == future.value() == 21
    assert (twice.wait(), seen) == (42, [21])
    for again in (future.set_result, future.set_exception):
        with pytest.raises(RuntimeError, match="only be marked completed once"):
            again(ValueError())
    future.add_done_callback(seen.append)  # of one that is done
    assert seen == [21, future]


def test_future_with_an_error_by_hand(world, caplog):
    future = dist.Future()
    after, handled = future.then(lambda found: found.value()), future.then(lambda found: "handled")
    with pytest.raises(AssertionError, match="of type str, not an Exception"):
        future.set_exception("text")
    future.set_exception(KeyError("mine"))
    for each in (future, after):
        with pytest.raises(KeyError, match="mine"):
            each.wait()
        with pytest.raises(KeyError, match="mine"):
            each.value()
    assert handled.wait() == "handled"
    future.add_done_callback(lambda found: found.value())  # nobody else suffers from its error
    assert "a callback of a future has failed" in caplog.text


def test_future_that_another_thread_completes(world):
    future = dist.Future()
    after = future.then(lambda found: found.value() + 1)
    threading.Timer(0.05, future.set_result, (1,)).start()
    assert after.wait() == 2


def test_future_that_an_operation_completes(world):
    """As comm hooks do it: the value is set in the callback of another future."""
    x, future = np.ones(2), dist.Future()
    dist.all_reduce(x, async_op=True).get_future().add_done_callback(lambda found: future.set_result(found.value()[0]))
    assert (future.wait() == world.size).all()
    with pytest.raises(RuntimeError, match="belongs to an operation"):
        dist.barrier(async_op=True).get_future().set_result(1)
    dist.barrier()


def test_all_of_several_futures(world):
    x, made = np.ones(2), dist.Future()
    futures = [dist.all_reduce(x, async_op=True).get_future(), made, dist.barrier(async_op=True).get_future()]
    together = dist.collect_all(futures)
    assert not together.done()
    made.set_result(7)
    assert together.wait() == futures
    assert dist.wait_all(futures)[1] == 7
    assert dist.wait_all([]) == []
    failed = dist.Future()
    failed.set_exception(ValueError("mine"))
    assert dist.collect_all([made, failed]).wait() == [made, failed]
    late = dist.Future()
    threading.Timer(0.1, late.set_result, (8,)).start()
    assert dist.collect_all([failed, late]).wait() == [failed, late]
    with pytest.raises(ValueError, match="mine"):
        dist.wait_all([made, failed])


def test_a_blocking_operation_in_a_callback_leaves_the_outer_wait_known(world):
    seen = []

    def inside(_):
        for call in (lambda: dist.all_reduce(np.ones(1)), dist.new_group, exchange):
            call()
            outer = operation.waiting.get(threading.get_ident())
            seen.append(outer and outer.name)

    def exchange():
        if world.size > 1 and world.rank < 2:
            first = world.rank == 0
            for call in (dist.send, dist.recv) if first else (dist.recv, dist.send):
                call(np.ones(1), 1 - world.rank)

    last = world.rank == world.size - 1
    if last:
        time.sleep(0.2)  # so that the others wait
    waited = dist.all_reduce(np.ones(1 << 20), async_op=True)
    waited.get_future().add_done_callback(inside)
    waited.wait()
    assert seen == ["all_reduce"] * 3 or (last and seen == [None] * 3)
    assert not operation.waiting
    dist.destroy_process_group()
    dist.init_process_group()


@pytest.mark.ranks(3)
def test_operations_know_their_own_number(world):
    """An operation is named by its own number, not by that of the last one."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    group = dist.new_group()
    if world.rank == 0:
        works = [dist.barrier(group, async_op=True) for _ in range(3)]
        for number, each in enumerate(works, 1):
            with pytest.raises(dist.DistTimeoutError, match=f"^barrier #{number} in"):
                each.wait(0.01)
        dist.barrier()
    else:
        dist.barrier()
        works = [dist.barrier(group, async_op=True) for _ in range(3)]
    for each in works:
        each.wait()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_blocking_receive_leaves_its_core_to_the_sender(world, monkeypatch):
    """With more ranks than cores, MPICH's Mprobe took 5 ms for 8 bytes: the rest of a time slice."""
    yields = []
    monkeypatch.setattr(requests.os, "sched_yield", lambda: yields.append(time.monotonic()))
    x = np.zeros(1)
    receive = {
        "recv": lambda: dist.recv(x, 1),
        "gather": lambda: dist.gather(x, [np.zeros(1) for _ in range(world.size)], dst=0),
    }
    send = {"recv": lambda: dist.send(x, 0) if world.rank == 1 else None, "gather": lambda: dist.gather(x, dst=0)}
    for name in receive:
        dist.barrier()
        del yields[:]
        if world.rank > 0:
            time.sleep(0.05)
            send[name]()
        elif world.size > 1:
            receive[name]()
            assert len(yields) > 10, name


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("made", ["by hand", "by an operation"])
def test_error_in_a_callback_does_not_lose_the_others(made, error):
    called = []

    def fail(future):
        called.append("first")
        raise error

    work = dist.all_reduce(np.ones(1 << 16), async_op=True) if made == "by an operation" else None
    future = dist.Future() if work is None else work.get_future()
    future.add_done_callback(fail)
    future.add_done_callback(lambda future: called.append("second"))
    try:
        if work is None:
            future.set_result(1)
        else:
            work.wait()
    except error:
        assert not issubclass(error, Exception), "an error of a callback is logged"
    future.wait()
    assert called == ["first", "second"]

"""Futures: of operations, made by hand, and their callbacks."""

import threading
import time

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.mpi import operation

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("made", ["by hand", "by an operation"])
def test_future(world, made):
    receive = dist.irecv(np.zeros(1), world.rank) if made == "by an operation" else None
    future, seen = dist.Future() if receive is None else receive.get_future(), []
    twice = future.then(lambda found: 2 * found.value()[0][0])
    more = twice.then(lambda found: found.value() + 1)
    future.add_done_callback(lambda found: seen.append(found.value()[0][0]))
    assert not future.done() and not twice.done()
    with pytest.raises(RuntimeError, match="not there yet"):
        future.value()
    if receive is None:
        future.set_result([np.full(1, 21.0)])
    else:
        with pytest.raises(RuntimeError):
            receive.source_rank()
        dist.isend(np.full(1, 21.0), world.rank).wait()
    assert (more.wait(), twice.value(), future.wait()[0][0], future.value()[0][0], seen) == (43, 42, 21, 21, [21])
    assert future.done() and twice.done()
    for again in (future.set_result, future.set_exception):
        with pytest.raises(RuntimeError, match="only be marked completed once" if receive is None else "belongs to an"):
            again(ValueError())
    future.add_done_callback(seen.append)  # of one that is done
    assert seen == [21, future] and future.then(lambda found: 5).wait() == 5


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


def test_a_blocking_operation_in_a_callback_leaves_the_outer_wait_known(world, anew):
    seen = []

    def inside(_):
        for call in (lambda: dist.all_reduce(np.ones(1)), dist.new_group, exchange):
            call()
            outer = operation.waiting.get(threading.get_ident())
            seen.append(outer and outer.call.name)

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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("made", ["by hand", "by an operation"])
def test_error_in_a_callback_does_not_lose_the_others(made, error):
    called = []

    def fail(future):
        called.append("first")
        raise error

    work = dist.all_reduce(np.ones(1 << 18), async_op=True) if made == "by an operation" else None
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

"""Work; and programs in which ranks wait at different places, which torch allows."""

import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from harness.collectives import COLLECTIVES, Submitted
from harness.inputs import finish, same
from harness.pretend import pretended_nodes
from harness.random_program import RandomProgram

import mpiddp as dist
from mpiddp.algorithms.plan import Plan, make_call
from mpiddp.distributed import dispatch
from mpiddp.mpi import lazy, recorder, requests

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]


def test_work(world):
    x = np.ones(3)
    submitted = dist.all_reduce(x, async_op=True)
    assert submitted.result()[0] is x
    assert submitted.wait() is submitted.wait(timedelta(seconds=1)) is True
    assert (submitted.is_completed(), submitted.is_success(), submitted.exception()) == (True, True, None)
    assert (submitted.result()[0] == world.size).all()
    with pytest.raises(RuntimeError):
        submitted.source_rank()
    submitted.synchronize()


def test_error_surfaces_in_wait(world):
    x = np.zeros(1)
    receive = dist.irecv(x, world.rank)
    dist.isend(np.zeros(2), world.rank).wait()
    future = receive.get_future()
    with pytest.raises(dist.ArrayError):
        receive.wait()
    assert receive.is_completed() and not receive.is_success() and isinstance(receive.exception(), dist.ArrayError)
    with pytest.raises(dist.ArrayError):
        future.wait()


@pytest.mark.parametrize("where", ["in Test", "in Wait", "in a later request"])
def test_memory_of_a_failed_operation_is_kept(world, group, monkeypatch, where):
    """MPI may still write to it: Open MPI's collectives fail while parts of them are on their way."""
    memory = []

    def fail():
        raise lazy.MPI.Exception(lazy.MPI.ERR_OTHER)

    class Request:
        Test, Wait = (bool, bool) if where == "in a later request" else (staticmethod(fail), staticmethod(fail))

    def steps(link, call):
        memory.append(weakref.ref(kept := np.ones(3)))
        yield requests.READY if where == "in a later request" else Request()
        kept += 1
        fail()

    monkeypatch.setattr(group._monitor, "verify_failed", lambda *_: None)
    monkeypatch.setattr(group._monitor, "translate", lambda *_: None)
    plan = Plan(make_call(group._link, "barrier"), steps)
    for run in (dispatch.perform,) if where == "in Wait" else (dispatch.submit, dispatch.perform):
        with pytest.raises(lazy.MPI.Exception):
            run(group, plan, (), ()) if run is dispatch.perform else run(group, plan, (), ()).wait()
        assert memory.pop()() is not None


def test_a_poll_that_finds_a_fault_waits_for_the_thread_that_polls(world, group, monkeypatch):
    looks, looked = threading.Event(), threading.Event()

    def check():
        looks.set()
        looked.wait()
        raise dist.DistError("a rank has failed")

    x = np.zeros(1)
    submitted = dist.irecv(x, world.rank, group=group)
    monkeypatch.setattr(group._monitor, "check", check)
    time.sleep(0.06)
    thread = threading.Thread(target=submitted.is_completed)
    thread.start()
    looks.wait()
    with requests.lock:
        looked.set()
        thread.join(0.1)
        assert submitted.exception() is None, "its step may be running"
    thread.join()
    assert isinstance(submitted.exception(), dist.DistError)
    monkeypatch.undo()
    requests.poll()


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


def test_a_short_call_ends_at_submission_if_all_ranks_have_come(world, group, eager_buffers):
    x, is_last = np.full(3, world.rank + 1.0), world.rank == world.size - 1
    dist.barrier(group)
    time.sleep(0.3 * is_last)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert not (is_last and requests.pending)
    assert work.wait() and (x == world.size * (world.size + 1) / 2).all()
    assert (last := recorder.entries()[-1]).end > 0 and last.number == group._link.sequence


def test_a_receive_is_open_while_a_group_is_made(world):
    x = np.zeros(100_000)
    receive = dist.irecv(x, (world.rank - 1) % world.size)
    group = dist.new_group()
    sent = dist.isend(np.ones(100_000), (world.rank + 1) % world.size)
    part = dist.split_group(group, [list(range(world.size))])
    if world.rank % 2:
        receive.wait()
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    finish([receive, sent])
    assert (x == 1).all()
    for each in (alone, part, group):
        dist.destroy_process_group(each)


@pytest.mark.core
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("nodes", ["0000", "0101", "0123"])
def test_random_program(world, nodes):
    with pretended_nodes([int(node) for node in nodes[: world.size]]):
        program = RandomProgram(world.rank, world.size, world.rng, np.random.default_rng([world.rank, *nodes.encode()]))
        program.run(200 if world.long else 60)
        dist.barrier()
        program.destroy()


def begin(world, group, name, **how):
    """Begin a call, and return its work, its outputs, and what they should be."""
    ranks = range(world.size)
    table = [[np.full(8, 10.0 * sender + receiver) for receiver in ranks] for sender in ranks]
    how |= {"group": group, "async_op": True}
    at = Submitted(world.rank, table, 0, dist.ReduceOp.SUM, how, np.asarray, dist)
    outputs, expected = COLLECTIVES[name](at)
    return at.returned, outputs, expected


@pytest.mark.parametrize("kind", ["all_to_all", "gather", "scatter"])
@pytest.mark.parametrize("reverse", [False, True])
def test_ring_beside_blocks(world, monkeypatch, kind, reverse):
    """Both send when they are submitted, but one posts its receive then, and the other probes at its turn."""
    monkeypatch.setenv("MPIDDP_EAGER", "0")  # through eager buffers blocks are no messages
    group = dist.new_group(timeout=20)
    begun = [begin(world, group, kind)]
    for ring in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
        begun += [begin(world, group, ring, algorithm="ring"), begin(world, group, kind)]
    for work, outputs, expected in reversed(begun) if reverse else begun:
        work.wait()
        assert all(map(same, outputs, expected))
    dist.destroy_process_group(group)


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=2)
def test_operations_know_their_own_number(world, group, alert):
    """An operation is named by its own number, not by that of the last one."""
    if world.rank == 0:
        works = [dist.barrier(group, async_op=True) for _ in range(3)]
        for number, each in enumerate(works, 1):
            with pytest.raises(dist.DistTimeoutError, match=f"^barrier #{number} in"):
                each.wait(0.01)
        dist.barrier()
    else:
        dist.barrier()
        works = [dist.barrier(group, async_op=True) for _ in range(3)]
    finish(works)


@pytest.mark.ranks(2)
def test_a_blocking_receive_leaves_its_core_to_the_sender(world, monkeypatch):
    """With more ranks than cores, MPICH's Mprobe took 5 ms for 8 bytes: the rest of a time slice."""
    yields = []
    monkeypatch.setattr(requests.os, "sched_yield", lambda: yields.append(time.monotonic()))
    x = np.zeros(1)
    for name in ("recv", "gather"):
        dist.barrier()
        del yields[:]
        time.sleep(0.05 * (world.rank > 0))
        if name == "gather":
            dist.gather(x, [np.zeros(1) for _ in range(world.size)] if world.rank == 0 else None, dst=0)
        elif world.size > 1 and world.rank < 2:
            dist.recv(x, 1) if world.rank == 0 else dist.send(x, 0)
        assert world.rank > 0 or world.size == 1 or len(yields) > 10, name

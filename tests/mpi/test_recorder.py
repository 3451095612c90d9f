"""The flight recorder: each kind of call leaves its entry, with the program's line, and keeps nothing alive."""

from __future__ import annotations

import _thread
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.faults import monitor
from mpiddp.faults.dumps import Dumps
from mpiddp.mpi import recorder, requests

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def group(world):
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def entries(group):
    job = monitor.current()
    found = Dumps(job.liveness, job.world).contents("a test")
    uid = f"{group.group_name}.{group.link.id & 0xFFFFFFFF}"
    collectives = [each for each in found["entries"] if each["process_group"][0] == uid]
    return collectives, [each for each in found["mpiddp"]["messages"] if each["process_group"][0] == uid]


def line():
    return inspect.currentframe().f_back.f_lineno


def ends(submitted):
    submitted.wait()


X = np.ones((2, 3), np.float32)
LONG = np.ones(100_000)
# Name, torch's name, sizes of input and output; {} in a size is the number of ranks.
CALLS = {
    "all_reduce": (lambda g, n: dist.all_reduce(X.copy(), group=g), "all_reduce", [[2, 3]], [[2, 3]]),
    "long": (lambda g, n: dist.all_reduce(LONG.copy(), group=g), "all_reduce", [[100_000]], [[100_000]]),
    "asynchronous": (
        lambda g, n: ends(dist.all_reduce(X.copy(), group=g, async_op=True)),
        *("all_reduce", [[2, 3]], [[2, 3]]),
    ),
    "limited": (lambda g, n: dist.barrier(g, timeout=60), "barrier", [[0]], [[0]]),
    "barrier": (lambda g, n: dist.barrier(g), "barrier", [[0]], [[0]]),
    "broadcast": (lambda g, n: dist.broadcast(X.copy(), group=g, group_src=0), "broadcast", [[2, 3]], [[2, 3]]),
    "reduce": (lambda g, n: dist.reduce(X.copy(), group=g, group_dst=0), "reduce", [[2, 3]], [[2, 3]]),
    "all_gather_single": (
        lambda g, n: dist.all_gather_single(np.empty((n, 2, 3), np.float32), X, group=g),
        *("_all_gather_base", [[2, 3]], [["n", 2, 3]]),
    ),
    "all_gather": (
        lambda g, n: dist.all_gather([X.copy() for _ in range(n)], X, group=g),
        *("all_gather", [[2, 3]], [["6n"]]),
    ),
    "reduce_scatter_single": (
        lambda g, n: dist.reduce_scatter_single(np.empty(2), np.ones(2 * n), group=g),
        *("_reduce_scatter_base", [["2n"]], [[2]]),
    ),
    "all_to_all_single": (
        lambda g, n: dist.all_to_all_single(np.empty(2 * n), np.ones(2 * n), group=g),
        *("all_to_all", [["2n"]], [["2n"]]),
    ),
    "coalesced": (
        lambda g, n: dist.all_reduce_coalesced([X.copy(), X.copy()], group=g),
        *("allreduce_coalesced", [[12]], [[12]]),
    ),
    "objects": (lambda g, n: dist.all_gather_object([None] * n, "x", group=g), "all_gather", [[0]], [[0]]),
}


def sizes(expected, ranks):
    def number(size):
        return size if isinstance(size, int) else int(size[:-1] or 1) * ranks

    return [[number(size) for size in each] for each in expected]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_leaves_one_entry(world, group, name):
    call, torchs, input_sizes, output_sizes = CALLS[name]
    call(group, world.size)
    call(group, world.size)
    found, messages = entries(group)
    assert [each["collective_seq_id"] for each in found] == [1, 2] and not messages
    for each in found:
        if world.size > 1:
            assert each["input_sizes"] == sizes(input_sizes, world.size)
            assert each["output_sizes"] == sizes(output_sizes, world.size)
        assert each["profiling_name"] == f"gloo:{torchs}"
        assert each["state"] == "completed" and each["retired"] and not each["is_p2p"]
        assert each["time_created_ns"] <= each["time_discovered_completed_ns"]
        assert each["frames"][0]["filename"] == __file__
        assert f"#{each['collective_seq_id']}" in each["mpiddp"]["text"]


def test_the_line_is_the_programs(world, group):
    dist.all_reduce(X.copy(), group=group)
    first = line() - 1
    for _ in range(2):
        dist.all_reduce(X.copy(), group=group)
    second = line() - 1
    submitted = dist.all_reduce(X.copy(), group=group, async_op=True)
    third = line() - 1
    submitted.wait()
    found, _ = entries(group)
    assert [each["frames"][0]["line"] for each in found] == [first, second, second, third]
    assert {each["frames"][0]["name"] for each in found} == {"test_the_line_is_the_programs"}


@pytest.mark.parametrize(
    "folder, own", [("examples", True), ("bench", True), ("training", True), ("parallel", False), ("", False)]
)
def test_programs_of_the_package_are_programs(world, group, folder, own):
    """`python -m mpiddp train` has no other line; DDP's lines say nothing."""
    file = str(Path(dist.__file__).parent / folder / "made_up.py")
    given: dict[str, Callable[..., None]] = {}
    exec(compile("def call(reduce, x, group):\n\n    reduce(x, group=group)", file, "exec"), given)
    for _ in range(2):
        given["call"](dist.all_reduce, X.copy(), group)
    here = line() - 1
    found, _ = entries(group)
    expected = (file, 3) if own else (__file__, here)
    assert [(each["frames"][0]["filename"], each["frames"][0]["line"]) for each in found] == [expected] * 2


def test_pending_operations_are_scheduled_or_started(world, group):
    works = [dist.all_reduce(LONG.copy(), group=group, async_op=True) for _ in range(3)]
    states = [each["state"] for each in entries(group)[0]]
    assert set(states) <= {"completed", "started", "scheduled"}
    assert "started" not in states[states.index("scheduled") :] if "scheduled" in states else True
    for each in works:
        each.wait()
    assert [each["state"] for each in entries(group)[0]] == ["completed"] * 3


def test_group_with_the_longest_time_limit(world):
    group = dist.new_group(timeout=timedelta.max)
    dist.all_reduce(X.copy(), group=group)
    assert [each["state"] for each in entries(group)[0]] == ["completed"]
    dist.destroy_process_group(group)


def test_messages(world, group):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    works = [dist.irecv(np.empty(2), left, group, tag=5), dist.isend(np.ones(2), right, group, tag=5)]
    for each in works:
        each.wait()
    if world.size > 1 and world.rank == 0:
        dist.send(np.ones(2), 1, group)
    elif world.rank == 1:
        dist.recv(np.ones(2), group=group)  # from any rank
    dist.barrier(group)
    found, messages = entries(group)
    assert [each["collective_seq_id"] for each in found] == [1]
    assert [each["p2p_seq_id"] for each in messages] == list(range(1, len(messages) + 1))
    expected = ["irecv", "isend"] + (["send"] if world.size > 1 and world.rank == 0 else [])
    assert [each["mpiddp"]["name"] for each in messages] == expected + (["recv"] if world.rank == 1 else [])
    assert all(each["state"] == "completed" and each["frames"][0]["filename"] == __file__ for each in messages)
    assert f"isend of float64 (2,) to rank {right} with tag 5" == messages[1]["mpiddp"]["text"]
    assert (messages[1]["mpiddp"]["peers"], messages[1]["mpiddp"]["tag"]) == ([right], 5)


def test_a_call_that_never_ended_stays_started(world):
    if world.size == 1:
        return
    group = dist.new_group()
    if world.rank:
        with pytest.raises(dist.DistTimeoutError):
            dist.barrier(group, timeout=0.1)
        assert [each["state"] for each in entries(group)[0]] == ["started"]
    dist.barrier()
    if not world.rank:
        dist.barrier(group)
    else:
        deadline = time.monotonic() + 10
        while len(group.link.queue) and time.monotonic() < deadline:
            requests.poll()
        assert [each["state"] for each in entries(group)[0]] == ["completed"]
    dist.barrier()
    dist.destroy_process_group(group)


def test_buckets_have_their_names(world):
    model = dist.DistributedDataParallel(nn.Linear(3, 2))
    model(np.ones((4, 3), np.float32)).sum().backward()
    names = [each[0][1] for each in recorder.ring]
    assert "DDP bucket 0" in names or world.size == 1


def test_nothing_is_kept_alive_and_the_ring_is_bounded(world, group):
    x = np.ones(5)
    gone = weakref.ref(x)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    del x
    gc.collect()
    assert gone() is None
    for _ in range(recorder.SIZE + 10):
        dist.all_reduce(X, group=group)
    assert len(recorder.ring) == recorder.SIZE
    job = monitor.current()
    found = Dumps(job.liveness, job.world).contents("a test")["entries"]
    records = [each["record_id"] for each in found]
    assert records == sorted(records) and records[-1] == recorder.collectives()


@pytest.mark.parametrize("call", [dist.barrier, dist.monitored_barrier])
def test_calls_that_no_python_code_has_made(world, monkeypatch, call):
    """As those that atexit makes: there is no frame of a program."""
    errors, ended = [], []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    recorder.ring.clear()
    _thread.start_new_thread(call, ())
    end = time.monotonic() + 20
    while not (errors or ended) and time.monotonic() < end:
        time.sleep(0.01)
        ended = [each for each in tuple(recorder.ring) if each[recorder.END]]
    assert not errors, errors[0].exc_value
    assert ended

"""The flight recorder: each kind of call leaves its entry, with the program's line, and keeps nothing alive."""

import _thread
import gc
import inspect
import json
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.faults import this_job
from mpiddp.faults.dumps import Dumps
from mpiddp.mpi import recorder, requests

pytestmark = pytest.mark.mpi


def entries(group):
    job = this_job.current()
    head, *found = Dumps(job.liveness, job.world).lines("a test")
    name = f"{group.group_name}.{group._link.id & 0xFFFFFFFF}"
    assert head["groups"][name]["ranks"] == list(group._link.ranks)
    own = [each for each in json.loads(json.dumps(found)) if each["group"] == name]
    return [each for each in own if each["compared"] is not None], [each for each in own if each["compared"] is None]


def state(call):
    return "ended" if call["ended"] else "queued" if call["queued"] else "begun"


def line():
    return inspect.currentframe().f_back.f_lineno


X = np.ones((2, 3), np.float32)
LONG = np.ones(150_000)
# Call, and its text; those of the other operations are in the tests of `faults.calls`.
SHORT = "all_reduce #1 of 6 float32 elements with SUM"
CALLS = {
    "all_reduce": (lambda g, n: dist.all_reduce(X.copy(), group=g), SHORT),
    "long": (lambda g, n: dist.all_reduce(LONG.copy(), group=g), "all_reduce #1 of 150000 float64 elements with SUM"),
    "asynchronous": (lambda g, n: dist.all_reduce(X.copy(), group=g, async_op=True).wait(), SHORT),
    "barrier": (lambda g, n: dist.barrier(g), "barrier #1"),
    "broadcast": (
        lambda g, n: dist.broadcast(X.copy(), group=g, group_src=0),
        "broadcast #1 of 6 float32 elements and group rank 0 as root",
    ),
    "objects": (lambda g, n: dist.all_gather_object([None] * n, "x", group=g), "all_gather_object #1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_leaves_one_entry(world, group, name):
    call, text = CALLS[name]
    call(group, world.size)
    call(group, world.size)
    found, messages = entries(group)
    assert [each["number"] for each in found] == [1, 2] and not messages
    if world.size > 1:
        assert found[0]["call"] == text
    for each in found:
        assert each["began"] <= each["ended"] and state(each) == "ended"
        assert each["file"] == __file__
        assert f"#{each['number']}" in each["call"]


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
    assert [each["line"] for each in found] == [first, second, second, third]
    assert {each["function"] for each in found} == {"test_the_line_is_the_programs"}


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
    assert [(each["file"], each["line"]) for each in found] == [expected] * 2


def test_group_with_the_longest_time_limit(world):
    group = dist.new_group(timeout=timedelta.max)
    dist.all_reduce(X.copy(), group=group)
    assert [state(each) for each in entries(group)[0]] == ["ended"]
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
    assert [each["number"] for each in found] == [1]
    assert [each["number"] for each in messages] == list(range(1, len(messages) + 1))
    expected = ["irecv", "isend"] + (["send"] if world.size > 1 and world.rank == 0 else [])
    assert [each["call"].split()[0] for each in messages] == expected + (["recv"] if world.rank == 1 else [])
    assert all(state(each) == "ended" and each["file"] == __file__ for each in messages)
    assert f"isend of float64 (2,) to rank {right} with tag 5" == messages[1]["call"]


@pytest.mark.mpi(min_size=2)
def test_a_call_that_never_ended_stays_started(world, group, alert):
    if world.rank:
        with pytest.raises(TimeoutError, match=r"(?s)barrier #1 .* did not finish in 0\.1 s.*    rank 0 \(node "):
            dist.barrier(group, timeout=timedelta(seconds=0.1))
        assert [state(each) for each in entries(group)[0]] == ["begun"]
    dist.barrier()
    if not world.rank:
        dist.barrier(group)
    else:
        deadline = time.monotonic() + 10
        while len(group._link.queue) and time.monotonic() < deadline:
            requests.poll()
        assert [state(each) for each in entries(group)[0]] == ["ended"]
    dist.barrier()


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
    assert len(entries(group)[0]) == recorder.SIZE


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
        ended = [each for each in recorder.entries() if each.end]
    assert not errors, errors[0].exc_value
    assert ended

"""Symmetric memory: how it is made, found, shared and given back, and its absence."""

import gc
import os
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from harness.inputs import finish

import mpiddp as dist
from mpiddp.algorithms import two_shot
from mpiddp.distributed.groups import default_group
from mpiddp.faults import watchdog
from mpiddp.faults.calls import make_call
from mpiddp.mpi import requests
from mpiddp.shm import segment
from mpiddp.shm.segment import NOWHERE, find

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    before = len(segment._by_number)
    yield
    gc.collect()
    assert len(segment._by_number) == before, "a segment outlived its arrays"
    assert not files_that_stay(), "a file was left"


def files_that_stay():
    """Return files that are still there 10 s later: other jobs' have names for a moment, too."""
    found, end = set(segment.FILES.glob("mpiddp-*")), time.monotonic() + 10
    while found and time.monotonic() < end:
        time.sleep(0.01)
        found &= set(segment.FILES.glob("mpiddp-*"))
    return found


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident_kib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool"])
def test_shape_and_dtype(world, dtype):
    for shape in [(), 0, 1, (3, 0, 2), (7, 11), 100_003, np.prod([3, 4]), np.array([2, 3])]:
        x = dist.symmetric_empty(shape, dtype)
        assert x.shape == np.empty(shape).shape and x.dtype == dtype
        assert x.flags.c_contiguous and x.flags.writeable
        x[...] = 1
        assert (x == 1).all()


def test_views_are_found_and_others_are_not(world):
    x, other = dist.symmetric_empty(64), dist.symmetric_empty(64)
    first = find(x)
    assert first.offset == segment.SKEW_BYTES and first != NOWHERE
    assert find(x[5:]) == first._replace(offset=first.offset + 20)
    assert find(x.reshape(8, 8)[2:][1:]) == first._replace(offset=first.offset + 96)
    assert find(x.view(np.uint8)[3:].view(np.int8)) == first._replace(offset=first.offset + 3)
    assert find(np.frombuffer(memoryview(x[1:]), np.float32)) == first._replace(offset=first.offset + 4)
    assert find(other).segment != first.segment
    assert find(np.from_dlpack(x[2:])) == first._replace(offset=first.offset + 8), (
        "a view that does not name its mapping"
    )
    assert find(np.from_dlpack(np.empty(64))) == NOWHERE
    for ordinary in (np.empty(64), np.empty(64)[3:], x.copy(), np.frombuffer(bytearray(64), np.uint8), np.empty(0)[:0]):
        assert find(ordinary) == NOWHERE


def test_memory_lives_as_long_as_any_view(world):
    x = dist.symmetric_empty(1000)
    x[...] = 7
    view = x.reshape(10, 100)[3:]
    number = find(x).segment
    del x
    gc.collect()
    assert find(view).segment == number and (view == 7).all()
    dist.all_reduce(view)
    assert (view == 7 * world.size).all()
    del view
    with pytest.raises(KeyError):
        segment.segment(number)


def test_memory_of_a_wait_that_the_watchdog_has_seen_is_gone_with_it(world, group, alert, monkeypatch):
    judge = watchdog.Watchdog._judge

    def slow(*args):
        time.sleep(0.4)  # still looks at the operation when the wait has ended
        judge(*args)

    monkeypatch.setattr(watchdog.Watchdog, "_judge", slow)
    for call in ("all_reduce", "recv"):
        x = dist.symmetric_empty(1000)
        x[...] = 1
        number = find(x).segment
        if world.rank == 0:
            time.sleep(0.6)  # the others are seen waiting
        if call == "all_reduce":
            dist.all_reduce(x, group=group)
        elif world.rank:
            dist.recv(x, 0, group)
        for peer in range(1, world.size) if call == "recv" and world.rank == 0 else ():
            dist.send(x, peer, group)
        del x
        with pytest.raises(KeyError):
            segment.segment(number)


@pytest.mark.parametrize("count", [100_000, 300_000])
def test_arrays_of_different_segments_and_of_none_give_the_right_sum(world, count):
    first, second = dist.symmetric_empty(count), dist.symmetric_empty(count)
    x = (first, second)[world.rank % 2]
    if world.rank == 2:  # which frees its own; the others do not notice
        del first, second
        x = np.empty(count, np.float32)
    x[...] = 1 + world.rank
    dist.all_reduce(x)
    assert (x == sum(range(1, world.size + 1))).all()


def test_an_array_of_all_ranks_serves_a_group_of_some(world):
    x = dist.symmetric_empty(300_000)
    x[...] = world.rank
    odd = [rank for rank in range(world.size) if rank % 2]
    some = dist.new_group(odd or [0])
    if world.rank in (odd or [0]):
        dist.all_reduce(x, group=some)
        assert (x == sum(odd)).all()
        dist.destroy_process_group(some)
    else:
        assert (x == world.rank).all()


def test_sizes_that_differ_are_an_error_on_every_rank(world):
    text = r"rank 0 calls symmetric_empty.* of 400 .*rank \d calls symmetric_empty.* of 800 "
    with pytest.raises(dist.MismatchError, match=text):
        dist.symmetric_empty(100 if world.rank == 0 else 200)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [((-1,), "f4", ValueError), (3, object, TypeError), (1 << 62, "f4", ValueError), (1 << 60, "f8", ValueError)],
)
def test_nonsense_is_refused(world, shape, dtype, error):
    with pytest.raises(error, match="symmetric_empty"):
        dist.symmetric_empty(shape, dtype)
    with pytest.raises(ValueError, match=r"got 'cuda'; take cupy\.empty"):
        dist.symmetric_empty(3, device="cuda")


def refuse(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["every rank", "one rank", "a limit on file sizes"])
def test_without_memory_arrays_are_ordinary_and_one_rank_says_so(world, where, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    why = "No space left on device"
    if where == "a limit on file sizes":
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if world.rank else 1 << 16, hard))
        why = "File too large"
    elif where == "every rank" or world.rank == world.size - 1:
        monkeypatch.setattr(segment, "_populate", refuse)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            x = dist.symmetric_empty(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        monkeypatch.undo()
    assert find(x) == NOWHERE and len(told) == (world.rank == 0)
    if told:
        assert f"memfd: {why}; /dev/shm: {why}" in str(told[0].message)
    x[...] = world.rank
    dist.all_reduce(x)
    assert (x == sum(range(world.size))).all()
    assert find(dist.symmetric_empty(1 << 20)) != NOWHERE, "the next one is shared again"


@pytest.mark.parametrize("why", ["no memfd", "one rank cannot open it", "one rank finds another process's file"])
def test_all_ranks_take_a_file_in_shm_instead(world, why, monkeypatch, tmp_path):
    if why == "no memfd":
        monkeypatch.delattr(os, "memfd_create")
    elif world.rank == 1:
        path, other = segment._path, tmp_path / "other"
        other.write_bytes(bytes(1 << 22))
        found = refuse if "cannot" in why else lambda *_: other
        monkeypatch.setattr(segment, "_path", lambda kind, *where: (found if kind == "memfd" else path)(kind, *where))
    x = dist.symmetric_empty(100_000)
    numbers = default_group().comm.allgather(find(x).segment)
    assert numbers[0] and len(set(numbers)) == 1
    assert not files_that_stay(), "it is unlinked when all have opened it"
    x[...] = 1
    dist.all_reduce(x)
    assert (x == world.size).all()


def test_ordinary_arrays_where_the_scratch_cannot_be_made(world, monkeypatch, group):
    monkeypatch.setattr(segment, "_populate", refuse)
    for dtype in ("float32", "float16"):
        x = np.full(600_000, 1, dtype)
        submitted = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
        finish(submitted)
        assert (x == world.size**2).all()
        call = make_call(group._link, "broadcast", (x,), count=x.size, root=0)
        requests.drive(two_shot.broadcast(group._link, call, x, 0))
    output = np.empty((world.size, 600_000), np.float32)
    dist.all_gather_single(output, np.full(600_000, world.rank, np.float32), group=group)
    assert (output == np.arange(world.size)[:, None]).all()


def test_making_and_freeing_does_not_grow(world):
    def cycles(number):
        for _ in range(number):
            x = dist.symmetric_empty(5000)
            x[0] = 1
            del x

    cycles(50)
    files, kib = open_files(), resident_kib()
    cycles(150)
    assert open_files() == files
    assert resident_kib() < kib + 2048

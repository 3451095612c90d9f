"""Ranks that disagree about a call: an error that names both sides, whatever the operation and its size.

A blocking call whose mismatch is found elsewhere ends the job: see ``test_calls_jobs.py``.
"""

import contextlib
import itertools
import time

import numpy as np
import pytest
from harness.inputs import Op, total
from harness.pretend import pretended_nodes
from harness.world import everybody

import mpiddp as dist
from mpiddp import nn, settings
from mpiddp.algorithms import native
from mpiddp.algorithms.blocks import Blocks
from mpiddp.faults import calls
from mpiddp.faults.calls import Calls
from mpiddp.mpi import lazy
from mpiddp.shm import eager, segment
from mpiddp.shm.eager import EagerBuffers

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.core]

LARGE = 1 << 20


def ones(count=4, dtype=np.float32):
    return np.ones(count, dtype)


def blocks(size, count=4, dtype=np.float32):
    return [ones(count, dtype) for _ in range(size)]


def gathered(group, count):
    return dist.all_gather_single(ones(count * group.size()), ones(count), group, async_op=True)


def scattered(group, count):
    return dist.reduce_scatter_single(ones(count), ones(count * group.size()), Op.SUM, group, async_op=True)


def reduced(group, count=4, dtype=np.float32, op=Op.SUM, **how):
    return dist.all_reduce(ones(count, dtype), op, group, async_op=True, **how)


def coalesced(group, *counts):
    return dist.all_reduce_coalesced([ones(count) for count in counts], group=group, async_op=True)


def listed(group, odd):
    outputs = [ones(3), *blocks(group.size() - 1)][:: -1 if odd else 1]
    return dist.all_gather(outputs, ones(outputs[group.rank()].size), group, True)


def exchanged(group, dtype):
    return dist.all_to_all(blocks(group.size(), dtype=dtype), blocks(group.size(), dtype=dtype), group, True)


# A call, which is another one on the odd rank, and the error's texts for most ranks' and for its call.
DIFFERS = r"#1 of {} float32 elements{} \(the sizes or the kinds of dtypes"
CALLS = {
    "count": (lambda g, odd: reduced(g, 4 + odd), "all_reduce #1 of 4 float32", "of 5 float32"),
    "dtype of equal size": (lambda g, odd: reduced(g, 4, "f4" if odd else "i4"), "4 int32 ", "4 float32 "),
    "reduction": (lambda g, odd: reduced(g, op=Op.AVG if odd else Op.SUM), "with SUM", "with AVG"),
    "operation": (lambda g, odd: dist.barrier(g, True) if odd else reduced(g), "all_reduce #1", "barrier #1"),
    "native and not": (lambda g, odd: reduced(g, LARGE if odd else 4), "of 4 ", "of 1048576 "),
    "by messages": (lambda g, odd: reduced(g, 4 + odd, algorithm="native"), "all_reduce by native #1 of 4 ", "of 5 "),
    "all_gather_single": (lambda g, odd: gathered(g, 3 + odd), "of 3 ", "of 4 "),
    "reduce_scatter_single": (lambda g, odd: scattered(g, 3 + odd), "of (6|9|12) ", "of (8|12|16) "),
    "all_gather of lists": (listed, "all_gather #1 of (7|11|15) ", "all_gather " + DIFFERS.format("(7|11|15)", "")),
    "all_to_all": (lambda g, odd: exchanged(g, "f8" if odd else "f4"), "all_to_all #1 of float32", "#1 of float64"),
    "coalesced": (
        lambda g, odd: coalesced(g, *((5, 3) if odd else (3, 5))),
        "all_reduce_coalesced #1 of 8 float32",
        "all_reduce_coalesced " + DIFFERS.format(8, " with SUM"),
    ),
}
SOME = ("count", "by messages", "all_to_all")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "") for name in CALLS),
        *itertools.product(SOME, ("the odd one is late", "the others are", "by polling")),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_all_ranks_hear_of_it(world, group, name, way):
    submit, first, second = CALLS[name]
    last = world.size - 1
    late, waker = {"the odd one is late": ([last], 0), "the others are": (range(last), last)}.get(way, ([], 0))
    if world.rank in late:
        dist.recv(np.empty(1), waker)
    time.sleep(0.1 * (way == "by polling" and world.rank == last))
    with pytest.raises(dist.MismatchError, match=f"(?s)disagree: rank . calls .*({first}).*rank . calls .*({second})"):
        submitted = submit(group, world.rank == last)
        for rank in late if world.rank == waker else ():
            dist.send(ones(1, float), rank)
        end = time.monotonic() + 20
        while way == "by polling" and not submitted.is_completed() and time.monotonic() < end:
            time.sleep(0.001)
        assert way != "by polling" or (submitted.exception() is not None and not submitted.is_success())
        submitted.wait()
    with pytest.raises(dist.MismatchError, match="cannot be used any more"):
        dist.all_reduce(ones(), group=group)
    assert total(None, 1) == world.size


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.mpi(min_size=2)
def test_error_of_mpi_waits_for_the_call_that_has_caused_it(world, monkeypatch, async_op, group):

    def truncated(*_):
        raise lazy.MPI.Exception(lazy.MPI.ERR_TRUNCATE)
        yield

    with pytest.raises(dist.MismatchError, match=r"rank 0 calls gather #1 of .*, rank . calls barrier #1"):
        if world.rank == 0:
            monkeypatch.setattr(native, "gather", truncated)
            work = dist.gather(ones(), blocks(world.size), 0, group, async_op)
        else:
            time.sleep(0.3)
            work = dist.barrier(group, async_op=True)
        work.wait()
    dist.barrier()


OTHER_DTYPES = {
    "text": ("S4", "S8"),
    "text of equal bytes": ("S8", "U2"),
    "times": ("M8[s]", "M8[ms]"),
    "records": ([("a", "f4"), ("b", "f4")], [("a", "f8")]),
}
MOVING = {
    "broadcast": lambda x, g: dist.broadcast(x, 0, g, True),
    "broadcast, native": lambda x, g: dist.broadcast(x, 0, g, True, algorithm="native"),
    "all_gather_single": lambda x, g: dist.all_gather_single(np.empty(x.size * g.size(), x.dtype), x, g, True),
    "all_to_all": lambda x, g: dist.all_to_all([np.empty_like(x) for _ in range(g.size())], [x] * g.size(), g, True),
}


@pytest.mark.parametrize(
    ("name", "count", "kinds"),
    [
        *((name, count, "text") for name in MOVING for count in (5, LARGE // 4)),
        *(("all_gather_single", 5, kinds) for kinds in OTHER_DTYPES if kinds != "text"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_dtypes_without_a_code_are_told_apart(world, group, name, count, kinds):
    odd = world.rank == world.size - 1
    x = np.zeros(count, OTHER_DTYPES[kinds][odd])
    other = "another dtype"
    differ = "the kinds of dtypes in their lists or trees differ"
    heard = pytest.raises(dist.MismatchError, match=f"(?s)rank . calls .*{other}.*rank . calls .*{other}.*{differ}")
    with heard:
        MOVING[name](x, group).wait()
        dist.destroy_process_group(group)  # the root of a short broadcast waits for no rank
    dist.barrier()


def broadcast(group, count=4, root=0):
    return dist.broadcast(ones(count), group_src=root, group=group, async_op=True)


def gather(group, root=0):
    return dist.gather(ones(), blocks(group.size()) if group.rank() == root else None, root, group, True)


def reduce(group, op=Op.SUM):
    return dist.reduce(ones(), 0, op, group, True)


ROOTED = {
    "root": (lambda g, odd: broadcast(g, root=int(odd)), "k 0 as", "k 1 as"),
    "broadcast": (lambda g, odd: broadcast(g, 4 + odd), "4", "5"),
    "reduce": (
        lambda g, odd: reduce(g, Op.AVG if odd else Op.SUM),
        *("reduce #1 .* with SUM and group rank 0", "reduce #1 .* with AVG and group rank 0"),
    ),
    # Each waits for nobody.
    "own roots": (lambda g, odd: broadcast(g, root=g.rank()), "broadcast #1 .*k . as", "broadcast #1 .*k . as"),
    "root, in MPI": (lambda g, odd: gather(g, int(odd)), "gather #1 .*k 0 as", "gather #1 .*k 1 as"),
    "gather and scatter": (
        lambda g, odd: dist.scatter(ones(), None, 0, g, True) if odd else gather(g),
        *("gather #1", "scatter #1"),
    ),
    "broadcast and reduce": (lambda g, odd: reduce(g) if odd else broadcast(g), "broadcast #1", "reduce #1"),
    # The others show their parts of the coalesced call before the last one comes, which does not have to wait.
    "part": (lambda g, odd: reduced(g) if odd else coalesced(g, 4), "all_reduce_coalesced", "all_reduce #1"),
}


@pytest.mark.parametrize(("name", "later"), [*((name, 0) for name in ROOTED), ("root", 20), ("reduce", 20)])
@pytest.mark.mpi(min_size=2)
def test_every_rank_hears_of_it_at_the_end_where_not_all_wait(world, group, name, later):
    submit, first, second = ROOTED[name]
    odd = world.rank == world.size - 1
    time.sleep(0.05 * odd)
    with pytest.raises(dist.MismatchError, match=f"(?s)disagree: rank . calls .*{first}.*rank . calls .*{second}"):
        submit(group, odd).wait()
        for _ in range(later):  # in which the ranks agree
            broadcast(group).wait()
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_bucket_is_named_as_such(world, group):
    model = dist.DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    named = r"rank 0 calls barrier #\d+, rank . calls DDP bucket 0 #\d+ of 10 float32 elements;"
    with pytest.raises(dist.MismatchError, match=named):
        if world.rank == 0:
            dist.barrier(group, async_op=True).wait()
        else:
            model(ones(8).reshape(2, 4)).sum().backward()


@pytest.mark.parametrize("way", ["pieces", "attach"])
@pytest.mark.parametrize("sizes", [(3, 4), (0, 4), (4, 0), (25_000, 4), (4, 25_000), (5, 150_000), (150_000, 5)])
@pytest.mark.mpi(min_size=2)
def test_blocks_of_another_size_than_expected(world, monkeypatch, sizes, way):
    """MPI may crash in a receive that is too short, and says nothing of one that is too long."""
    monkeypatch.setattr(Blocks, "_next_way", lambda *_: way)
    sent, expected = sizes
    last = world.size - 1
    many = blocks(world.size)
    for async_op in (False, True):
        text = f"gather: rank {last} sends {4 * sent} bytes to rank 0, which expects {4 * expected}"
        with pytest.raises(dist.MismatchError, match=text) if world.rank == 0 else contextlib.nullcontext():
            outputs = [*many[:-1], ones(expected)] if world.rank == 0 else None
            done(dist.gather(ones(sent if world.rank == last else 4), outputs, 0, async_op=async_op))
        text = f"rank 0 sends {4 * sent} bytes to rank {last}, which expects {4 * expected}"
        with pytest.raises(dist.MismatchError, match=text) if world.rank == last else contextlib.nullcontext():
            inputs = [*many[:-1], ones(sent)] if world.rank == 0 else None
            done(dist.scatter(ones(expected if world.rank == last else 4), inputs, 0, async_op=async_op))
        with pytest.raises(dist.MismatchError, match=text) if world.rank == last else contextlib.nullcontext():
            outputs = [ones(expected if world.rank == last else 4), *many[1:]]
            inputs = [*many[:-1], ones(sent if world.rank == 0 else 4)]
            done(dist.all_to_all(outputs, inputs, async_op=async_op))
    assert total(None, 1) == world.size, "the group goes on"


def done(submitted):
    if submitted is not None:
        submitted.wait()


def test_what_may_differ(world):
    """The factor, the shapes of gathered arrays, the layout in memory."""
    x = ones()
    dist.all_reduce(x, Op.PREMUL_SUM(float(world.rank)))
    dist.all_reduce(x.reshape(2, 2) if world.rank else x)
    outputs = [ones(rank) for rank in range(world.size)]
    dist.all_gather(outputs, ones(world.rank))
    dist.gather(ones(world.rank), outputs if world.rank == 0 else None)
    dist.scatter(ones(world.rank), outputs if world.rank == 0 else None)
    dist.all_to_all([ones(world.rank) for _ in outputs], outputs)
    pool = dist.symmetric_empty(LARGE)
    dist.all_reduce(pool if world.rank else ones(LARGE))
    dist.broadcast_object_list([world.rank] * 3, 0)


def test_more_in_flight_than_the_ranks_keep_calls(world, group):
    arrays = [np.full(1 + number % 7, float(number)) for number in range(300)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in arrays]
    for index in np.random.default_rng(world.rank).permutation(len(works)):
        works[index].wait()
    assert all((x == number * world.size).all() for number, x in enumerate(arrays))


@pytest.mark.mpi(min_size=2)
def test_all_ranks_hear_that_long_arrays_differ(world, group):
    in_rounds = group._link.find(EagerBuffers) is not None
    with pytest.raises(dist.MismatchError, match=r"rank \d calls .*1048576 .*rank \d calls .*1048577 "):
        dist.all_reduce(ones(LARGE + (world.rank == world.size - 1)), group=group)
    x = ones()
    if in_rounds:
        with pytest.raises(dist.MismatchError, match="The group cannot be used any more"):
            dist.all_reduce(x, group=group)
    elif group._link.one_node:
        dist.all_reduce(x, group=group)
        assert (x == world.size).all()


def _refuse(*_):
    raise OSError(28, "No space left on device")


def test_without_shared_memory_a_node_does_not_compare(world, monkeypatch):
    monkeypatch.setattr(segment, "_populate", _refuse)
    group = dist.new_group()
    monkeypatch.undo()
    assert group._link.find(EagerBuffers) is None
    x = ones()
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    assert (x == world.size**2).all()
    dist.destroy_process_group(group)


SIZES = {
    "all_reduce": lambda x, table, g: dist.all_reduce(x, group=g),
    "broadcast": lambda x, table, g: dist.broadcast(x, 0, g),
    "reduce": lambda x, table, g: dist.reduce(x, 0, group=g),
    "all_gather_single": lambda x, table, g: dist.all_gather_single(table, x, g),
    "reduce_scatter_single": lambda x, table, g: dist.reduce_scatter_single(x, table, group=g),
    "all_reduce_coalesced": lambda x, table, g: dist.all_reduce_coalesced([x, x.copy()], group=g),
    "broadcast_object_list": lambda x, table, g: (
        dist.broadcast_object_list(["x" * x.size], 0, g) if g.rank() else dist.barrier(g)
    ),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.mpi(min_size=2)
def test_between_nodes_mpi_gets_no_arrays_of_other_sizes(world, name):
    """Open MPI would write over freed memory, and MPICH fail an assertion."""
    count, kind = (20_000, np.int32) if world.rank == 1 else (10_003, np.int64)
    other = "barrier #1" if "object" in name else r"#1 of \d+ int64"
    with pretended_nodes(range(world.size)):
        group = dist.new_group()
        with pytest.raises(dist.MismatchError, match=f"rank 0 calls .*{other}.*rank 1 calls {name} #1"):
            SIZES[name](ones(count, kind), ones(count * world.size, kind), group)
        dist.barrier(group)  # it goes on
        dist.destroy_process_group(group)


def test_without_shared_memory_nodes_compare(world, monkeypatch):
    if world.size < 3:
        pytest.skip("no two ranks share a node")
    monkeypatch.setattr(segment, "_populate", _refuse)
    with pretended_nodes([rank % 2 for rank in range(world.size)]):
        monkeypatch.undo()
        if world.rank == 1:
            dist.gather(ones(), dst=0)
        with pytest.raises(dist.MismatchError, match=r"rank 0 calls all_reduce #1 .*rank 1 calls gather #1"):
            dist.all_reduce(ones())
        if world.rank != 1:  # no message is left behind
            dist.gather(ones(), blocks(world.size) if world.rank == 0 else None, dst=0)


@pytest.mark.mpi(min_size=2)
def test_a_barrier_of_many_ranks_of_a_node_is_in_their_records(world, monkeypatch):
    monkeypatch.setattr(eager, "MAX_RANKS", 1)
    group = dist.new_group()
    records = group._link.find(Calls)
    if not group._link.one_node or not records.ordered or not settings.eager():
        pytest.skip("needs one node and ordered stores")
    assert group._link.find(EagerBuffers) is None
    for late in range(world.size):
        time.sleep(0.02 * (world.rank == late))
        before_s = time.monotonic()
        with monkeypatch.context() as patched:
            patched.setattr(group._link, "now", None)  # no message
            dist.barrier(group)
        after_s = time.monotonic()
        times = everybody((before_s, after_s))
        assert max(before for before, _ in times) <= min(after for _, after in times)
    for _ in range(calls._ROWS + 1):
        dist.barrier(group)
    works = [dist.barrier(group, async_op=True) for _ in range(10)]
    assert all(work.wait() for work in works)
    dist.destroy_process_group(group)

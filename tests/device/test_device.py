"""CuPy arrays in every operation, on the fake device: late streams, addresses, nodes, several devices, errors."""

import gc
import itertools
import random
from typing import Any

import numpy as np
import pytest
from harness.collectives import COLLECTIVES, check
from harness.inputs import OPS, both_ways, close, draw, dtype_of, end, finish, own_op, reduced, same
from harness.on_device import by_address, cupy, reductions, renew
from harness.pretend import connect
from harness.world import everybody

import mpiddp as dist
from mpiddp import device
from mpiddp.algorithms import plan
from mpiddp.algorithms.gpu import table
from mpiddp.algorithms.pairs import merges
from mpiddp.device import pinned, stream
from mpiddp.distributed.groups import default_group
from mpiddp.errors import ArrayError, MismatchError
from mpiddp.mpi import cuda_aware, requests
from mpiddp.mpi.cuda_aware import DevicePointers, Support
from mpiddp.mpi.reduction import in_pairs

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3)]

__all__ = ["by_address", "cupy"]  # fixtures
Array = Any
DTYPES = ["bool", "int8", "int64", "uint16", "float16", "bfloat16", "float32", "float64", "complex64"]
LONG = ("staged_ring", "device_ring", "staged_two_shot")


def steps_of(name: str, x: Array, op: Any) -> Any:
    """Return the steps of an algorithm for long arrays, also of one that MPI would crash in."""
    link, function = default_group()._link, table.ALGORITHMS[name].all_reduce
    if name != "staged_two_shot":
        return function(link, x, op)
    return function(link, plan.make(link, "all_reduce", None, x, x, op).call, x, op)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(LONG, ("float32", "bfloat16")), ("staged_ring", "int8"), ("staged_two_shot", "complex64")],
)
def test_algorithm(world: Any, cupy: Any, name: str, kind: str) -> None:
    dtype = dtype_of(kind)
    for op, size in reductions(world, dtype):
        xs = draw(world.rng, world.size, (size,), dtype)
        x = cupy.asarray(xs[world.rank])
        requests.drive(steps_of(name, x, own_op(op, world.rank)))
        assert close(x.get(), reduced(op, xs)), (op, size)


@pytest.mark.parametrize("kind", DTYPES)
def test_all_reduce(world: Any, cupy: Any, kind: str) -> None:
    ops = [(op, (31, 37)) for op in OPS]
    for (op, shape), how in itertools.product([*ops, (OPS[0], ()), (OPS[0], (2, 0, 3))], both_ways()):
        check(world, "all_reduce", dtype_of(kind), shape, how, op=op, make=cupy.asarray, read=cupy.asnumpy)


def test_every_rank_has_the_same_bits(world: Any, cupy: Any) -> None:
    rows = world.rng.standard_normal((world.size, 5000)).astype(np.float32)
    for name in LONG if world.size > 1 else ():
        x = cupy.asarray(rows[world.rank])
        requests.drive(steps_of(name, x, dist.ReduceOp.SUM))
        assert len(set(everybody(x.get().tobytes()))) == 1


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["bfloat16", "complex64"])
def test_one_rank_multiplies_as_the_host_does(
    world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also on a device that is not the current one: the factor is not rounded to a half, and nothing leaves it."""
    monkeypatch.setattr(pinned, "take", lambda nbytes: pytest.fail("memory of the host"))
    x = world.rng.standard_normal(3000).astype(np.float32).astype(dtype_of(kind))
    with cupy.cuda.Device(1):
        y = cupy.asarray(x)
    for factor in (1 / 3, 1e-6, 0.5):
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(factor))
        dist.all_reduce(y, dist.ReduceOp.PREMUL_SUM(factor))
        assert y.get().tobytes() == x.tobytes()


@pytest.mark.mpi(min_size=2)
def test_a_sum_in_pairs_has_the_host_s_bits(world: Any, cupy: Any) -> None:
    ranks = range(world.size)
    op = in_pairs(0.3, merges(ranks, [range(rank, rank + 1) for rank in ranks]))
    x = world.rng.standard_normal((world.size, 5000)).astype(np.float32)[world.rank]
    y = cupy.asarray(x)
    dist.all_reduce(x, op)
    dist.all_reduce(y, op)
    assert y.get().tobytes() == x.tobytes()


@pytest.fixture(params=["through the host", "by address"])
def _way(request: pytest.FixtureRequest, cupy: Any) -> None:
    if request.param == "by address":
        request.getfixturevalue("by_address")


@pytest.mark.core
@pytest.mark.ranks(1, 3)
@pytest.mark.usefixtures("_way")
def test_collectives(world: Any, cupy: Any) -> None:
    cases = [("float32", (997,)), ("bfloat16", ()), ("int8", (0,))]
    for name, (kind, shape), how in itertools.product(COLLECTIVES, cases, both_ways()):
        check(world, name, dtype_of(kind), shape, how, make=cupy.asarray, read=cupy.asnumpy)


@pytest.mark.core
@pytest.mark.ranks(1, 3)
def test_reductions_by_address(world: Any, cupy: Any, by_address: DevicePointers) -> None:
    link, dtype = default_group()._link, np.dtype(np.float64)
    for op, size in reductions(world, dtype):
        check(world, "all_reduce", dtype, (size,), op=op, make=cupy.asarray, read=cupy.asnumpy)
    library = cuda_aware.library_name()
    steps = table.choose("all_reduce", link, cupy.ones(3, np.float32), dist.ReduceOp.SUM, len, None)
    if world.size > 1:
        # Open MPI reads device memory with the processor there, and dies: ompi#9845, #12045
        assert (steps.__module__.endswith("gpu.pointers")) == (not library.startswith("Open MPI"))


def check_in_place(world: Any, cupy: Any, how: dict[str, Any], group: Any = None) -> None:
    """Gather to, and reduce into, the row of each rank."""
    rank, size = world.rank, world.size
    whole = cupy.zeros((size, 700), np.float32)
    whole[rank] = rank + 1.0
    end(dist.all_gather_single(whole, whole[rank], group, **how), how)
    assert same(whole.get(), np.repeat(np.arange(1, size + 1, dtype=np.float32), 700).reshape(size, 700))
    end(dist.reduce_scatter_single(whole[rank], whole, group=group, **how), how)
    assert same(whole[rank].get(), np.full(700, size * (rank + 1.0), np.float32))


def test_in_place(world: Any, cupy: Any) -> None:
    check_in_place(world, cupy, {})


def test_coalesced(world: Any, cupy: Any) -> None:
    kinds = ((3, "float32"), (500, "float64"), (7, "float32"))
    xs = [cupy.full(count, world.rank + 1.0, kind) for count, kind in kinds]
    dist.all_reduce_coalesced(xs)
    assert all((x.get() == world.size * (world.size + 1) / 2).all() for x in xs)


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.usefixtures("_way")
def test_messages(world: Any, cupy: Any) -> None:
    """Send device and host arrays in turns; they arrive in order."""
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    count = 8
    for kind in ("float32", "bfloat16"):
        dtype = dtype_of(kind)
        sent = [np.full(200 * index, index + 10 * world.rank, dtype) for index in range(count)]
        one = dtype.type(1)  # 1 makes float32 of bfloat16 before NumPy 2.2
        works = [dist.isend(cupy.asarray(x) * one if i % 3 else x, following, tag=5) for i, x in enumerate(sent)]
        received = [(cupy if index % 2 else np).zeros(200 * index, dtype) for index in range(count)]
        works += [dist.irecv(x, before, tag=5) for x in received]
        for each in reversed(works):
            each.wait()
        for index, x in enumerate(received):
            found = x.get() if index % 2 else x
            assert same(found, np.full(200 * index, index + 10 * before, dtype)), index
    if world.size > 1:
        x = cupy.zeros(11, np.float32)
        if world.rank == 0:
            dist.send(x + 3, 1)
        elif world.rank == 1:
            longer = cupy.full(15, 9, np.float32)
            assert dist.recv(longer) == 0
            assert longer.get().tolist() == [3.0] * 11 + [9.0] * 4
        dist.barrier()


def test_message_that_does_not_fit(world: Any, cupy: Any) -> None:
    sends = [dist.isend(cupy.full(count, 1, np.float32), world.rank) for count in (9, 4)]
    posted = [dist.irecv(cupy.empty(4, np.float32), world.rank) for _ in range(2)]
    with pytest.raises(ArrayError, match="9 elements"):
        posted[0].wait()
    posted[1].wait()
    assert posted[1].count() == 4
    assert posted[1].result()[0].get().tolist() == [1.0] * 4
    finish(sends)


@pytest.mark.ranks(3)
def test_an_interrupt_at_a_message_leaves_the_next_receive_right(world: Any, cupy: Any, monkeypatch: Any) -> None:
    """Here in the first step of the receive, which takes pinned memory."""
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    works, taken = [dist.irecv(cupy.zeros(4, np.float32), before) for _ in range(2)], []
    real = pinned.take

    def take(size_bytes: int) -> Any:
        taken.append(size_bytes)
        if len(taken) == 1:
            raise KeyboardInterrupt
        return real(size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(pinned, "take", take)
        sends = [dist.isend(np.full(4, value, np.float32), following) for value in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            works[0].wait()
        works[1].wait()
    assert works[1].result()[0].get().tolist() == [2.0] * 4
    finish(sends)


def test_operation_waits_for_the_current_stream(world: Any, cupy: Any) -> None:
    total = sum(range(1, world.size + 1))
    for count in (3, 4000):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(count, np.float64)
            for _ in range(60):  # a long kernel
                x += world.rank + 1
            dist.all_reduce(x)
            assert (x.get() == 60 * total).all()


def test_earlier_kernels_read_what_was_there_before(world: Any, cupy: Any) -> None:
    for count in (3, 4000):
        x = cupy.full(count, world.rank + 1.0)
        before = x * 2
        for _ in range(30):
            before += x
        works = [dist.all_reduce(x, async_op=True)]
        finish(works)
        with cupy.cuda.Stream(non_blocking=True):  # knows nothing of the operation
            after = (x + 1).get()
        assert (before.get() == 32 * (world.rank + 1)).all()
        assert (after == world.size * (world.size + 1) / 2 + 1).all()


def test_arrays_on_their_way_are_kept(world: Any, cupy: Any) -> None:
    works = []
    for index in range(12):
        works += [dist.all_reduce(cupy.full(n, index, np.float32), async_op=True) for n in (400 * index, 3)]
        cupy.full(400 * index, 77, np.float32)  # takes the memory of what was dropped
        gc.collect()
    for index, each in enumerate(works):
        each.wait()
        assert (each.result()[0].get() == world.size * (index // 2)).all()


def test_pinned_memory_is_used_again(world: Any, cupy: Any) -> None:
    x = cupy.ones(3000)

    def step() -> None:
        for _ in range(3):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            requests.drive(steps_of("staged_ring", x, dist.ReduceOp.MAX))

    step()
    before = len(cupy._memory.PINNED)
    step()
    assert len(cupy._memory.PINNED) == before


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [*LONG, "staged"])
def test_without_events_it_would_be_wrong(world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(stream.Mark, "Test", lambda self: True)
    monkeypatch.setattr(stream.Mark, "Wait", lambda self: None)
    right = True
    for _ in range(5):
        x = cupy.zeros(40 if name == "staged" else 4000)
        for _ in range(20):
            x += world.rank + 1
        link, args = default_group()._link, (x, dist.ReduceOp.SUM)
        made = plan.make(link, "all_reduce", None, x, *args)
        requests.drive(made.steps(link, made.call, *args) if name == "staged" else steps_of(name, *args))
        right &= bool((x.get() == 10 * world.size * (world.size + 1)).all())
    assert not all(everybody(right))
    cupy.cuda.synchronize_all()
    pinned._free.clear()
    pinned._lent.clear()  # what was given back too early


def test_interleaved(world: Any, cupy: Any) -> None:
    """Ranks submit in one order and wait in others, on two groups, with arrays of both kinds."""
    part = dist.new_group(list(range(max(world.size - 1, 1))))
    orders = random.Random(world.rank)
    for trial in range(4):
        draws = random.Random(trial)
        running = []
        for _ in range(14):
            group = draws.choice([None, part])
            members = world.size if group is None else max(world.size - 1, 1)
            on_device, count, what = draws.random() < 0.7, draws.choice([3, 900, 5000]), draws.randrange(2)
            if group is not None and world.rank >= members:
                continue
            x = (cupy if on_device else np).full(count, world.rank + 1.0)
            if what == 1:
                running.append((dist.broadcast(x, 0, group, async_op=True), x, 1.0))
            else:
                running.append((dist.all_reduce(x, group=group, async_op=True), x, members * (members + 1) / 2))
        orders.shuffle(running)
        for each, x, value in running:
            each.wait()
            found = x.get() if device.is_device_array(x) else x
            assert (found == value).all()
    if world.rank < max(world.size - 1, 1):
        dist.destroy_process_group(part)


@pytest.mark.mpi(min_size=2)
def test_host_and_device_do_not_meet(world: Any, cupy: Any) -> None:
    for count in (3, 300_000):
        x = (cupy if world.rank == 0 else np).ones(count, np.float32)
        with pytest.raises(MismatchError, match="on a device"):
            dist.all_reduce(x, async_op=True).wait()
        renew()


def test_overrides(world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("staged_ring", "tree"):
        monkeypatch.setenv("MPIDDP_ALGORITHM", f"all_reduce:{name}")
        renew()
        for x in (cupy.full(5000, world.rank + 1.0), np.full(5000, world.rank + 1.0)):
            dist.all_reduce(x)
            assert (np.asarray(device.download(x)) == world.size * (world.size + 1) / 2).all()
    if world.size > 1:
        monkeypatch.setenv("MPIDDP_ALGORITHM", "all_reduce:device_ring")
        renew()
        with pytest.raises(ValueError, match="needs an MPI that takes addresses"):
            dist.all_reduce(cupy.ones(3))
        with pytest.raises(ValueError, match="there is no algorithm all_reduce:device_two_shot"):
            dist.all_reduce(cupy.ones(3), algorithm="device_two_shot")
    monkeypatch.undo()
    renew()


def test_one_no_is_everybodys(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_CUDA_AWARE", "0" if world.rank == world.size - 1 else "1")
    renew()
    assert not table.addresses.point_to_point.yes
    assert isinstance(table.addresses.collectives, Support)
    monkeypatch.undo()
    renew()


def test_two_nodes(world: Any, cupy: Any) -> None:
    link, _ = connect([rank // 2 for rank in range(world.size)])
    for op, size in reductions(world, np.dtype(np.float32)):
        xs = draw(world.rng, world.size, (size,), np.dtype(np.float32))
        mine = own_op(op, world.rank)
        for algorithm in (None, "staged_two_shot"):
            x = cupy.asarray(xs[world.rank])
            made = plan.make(link, "all_reduce", algorithm, x, x, mine)
            requests.drive(made.steps(link, made.call, x, mine))
            assert close(x.get(), reduced(op, xs)), (op, size, algorithm)
    link.close()


def test_the_current_device_may_change_between_calls(world: Any, cupy: Any) -> None:
    """An array's place counts."""
    total, home = world.size * (world.size + 1) / 2, cupy.cuda.runtime.getDevice()
    y = cupy.full(9000, world.rank + 1.0)
    with cupy.cuda.Device(1 - home):
        z = cupy.full(9000, world.rank + 1.0)
    with cupy.cuda.Device(world.rank % 2):
        works = [dist.all_reduce(x, async_op=True) for x in (y, z)]
    finish(works)
    dist.all_reduce(z, dist.ReduceOp.AVG)
    assert (y.get() == total).all() and (z.get() == total).all()


@pytest.mark.usefixtures("_way")
def test_lists_over_devices(world: Any, cupy: Any) -> None:
    """Exchange arrays of which every second is on another device, behind long kernels."""

    def at(number: int, value: float) -> Array:
        with cupy.cuda.Device(number):
            x = cupy.zeros(700)
            for _ in range(30):
                x += value / 30
            return x

    rank, size = world.rank, world.size
    outs = [at(index % 2, 0) for index in range(size)]
    dist.all_to_all(outs, [at((index + 1) % 2, 30.0 * (10 * rank + index)) for index in range(size)])
    assert [round(float(out.get()[-1])) for out in outs] == [30 * (10 * other + rank) for other in range(size)]
    dist.all_gather(outs, at(1, 30.0 * rank))
    assert [round(float(out.get()[0])) for out in outs] == [30 * other for other in range(size)]
    x = at(rank % 2, 0)
    dist.scatter(x, [at(index % 2, 60.0 * index) for index in range(size)] if rank == 0 else None, 0)
    assert round(float(x.get()[350])) == 60 * rank
    mixed = [np.zeros(700) if index % 2 else at(1, 0) for index in range(size)] if rank == 0 else None
    dist.gather(x, mixed, 0)
    assert rank or [round(float(device.download(each)[1])) for each in mixed] == [60 * index for index in range(size)]
    part = at(1, 0)
    dist.reduce_scatter_single(part, cupy.full((size, 700), rank + 1.0))
    assert (part.get() == size * (size + 1) / 2).all()

"""Groups of ``backend="nccl"``: arrays of GPUs by NCCL if it does what is meant, everything else over MPI.

NCCL is a fake that does its work by MPI, as late as a stream does, and takes note of its calls.
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness.collectives import check
from harness.faking import fake_gpu
from harness.inputs import Op, both_ways, dtype_of, means_something

import mpiddp as dist
from mpiddp import nn

from .test_device import check_in_place

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


@pytest.fixture
def cupy(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the fake, with a GPU for each rank."""
    monkeypatch.setenv("FAKE_GPU_UUID", str(world.rank))
    with fake_gpu() as module:
        import cupy.cuda.nccl

        cupy.cuda.nccl.CALLS.clear()
        yield module


@pytest.fixture
def group(cupy: Any) -> Iterator[dist.ProcessGroup]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = dist.new_group(backend="nccl")
    yield made
    if not made._link.closed:
        dist.destroy_process_group(made)


def calls(cupy: Any) -> list[str]:
    found = [name for name, _, _ in cupy.cuda.nccl.CALLS]
    cupy.cuda.nccl.CALLS.clear()
    return found


FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("int32", "uint8")
OPS = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.PREMUL_SUM(0.5), Op.BOR]


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS, "int16", "bool", "complex64"])
def test_all_reduce(world: Any, cupy: Any, group: Any, name: str) -> None:
    dtype = dtype_of(name)
    for op, how in itertools.product(OPS, both_ways()):
        check(world, "all_reduce", dtype, (3, 37), {**how, "group": group}, op=op, make=cupy.asarray, read=cupy.asnumpy)
        by_nccl = name in FLOATS + INTEGERS and op.name != "BOR" and means_something(op, dtype)
        by_nccl &= not (op.name in ("MIN", "MAX") and name in FLOATS)
        assert calls(cupy) == ["allReduce"] * by_nccl, (op, how)


@pytest.mark.parametrize("how", list(both_ways()), ids=["blocking", "async"])
def test_the_others(world: Any, cupy: Any, group: Any, how: Any) -> None:
    given = {"how": {**how, "group": group}, "make": cupy.asarray, "read": cupy.asnumpy}
    check(world, "broadcast", np.dtype(np.int16), (5,), **given)
    check(world, "all_gather_single", np.dtype(np.float32), (3,), **given)
    for op in (Op.SUM, Op.PREMUL_SUM(2.0), Op.AVG):
        check(world, "reduce", np.dtype(np.float64), (4,), op=op, **given)
    check(world, "reduce_scatter_single", np.dtype(np.float64), (2,), **given)
    assert calls(cupy) == ["broadcast", "allGather", *["reduce"] * 3, "reduceScatter"]

    check_in_place(world, cupy, how, group)
    assert calls(cupy) == ["allGather", "reduceScatter"]


def test_it_waits_for_kernels_before_and_orders_those_after(world: Any, cupy: Any, group: Any) -> None:
    for _ in range(20):
        x = cupy.zeros(100)
        for _ in range(world.rank + 1):
            x += 1
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        x *= 2
        assert (x.get() == world.size * (world.size + 1)).all()


def test_arrays_of_the_host_and_moves_that_nccl_has_not_here_keep_mpi(world: Any, cupy: Any, group: Any) -> None:
    x = np.full(10, world.rank + 1.0)
    dist.all_reduce(x, group=group)
    assert (x == world.size * (world.size + 1) / 2).all()
    objects: list[Any] = [None] * world.size
    dist.all_gather_object(objects, world.rank, group=group)
    assert objects == list(range(world.size))
    got = [cupy.zeros(2) for _ in range(world.size)]
    dist.all_to_all(got, [cupy.full((2,), 10.0 * world.rank + r) for r in range(world.size)], group=group)
    assert [float(each[0]) for each in got] == [10.0 * r + world.rank for r in range(world.size)]
    assert calls(cupy) == []


def test_names(world: Any, cupy: Any, group: Any) -> None:
    assert dist.get_backend(group) == "nccl" and dist.get_backend_config(group) == "cpu:mpi,cuda:nccl"
    assert dist.get_backend() == "mpi" and dist.is_nccl_available() and dist.is_backend_available("nccl")
    by_device = dist.new_group(backend="cpu:gloo,cuda:nccl")
    host_only = dist.new_group(backend="cpu:nccl,cuda:gloo")
    assert (dist.get_backend(by_device), dist.get_backend(host_only)) == ("nccl", "mpi")
    alone = dist.split_group(group, split_ranks=[[rank] for rank in range(world.size)])
    assert dist.get_backend(alone) == "nccl", "as the group it is made from"
    x = cupy.ones(3)
    dist.all_reduce(x, group=alone)
    assert calls(cupy) == ["allReduce"] and (x.get() == 1).all()
    for each in (alone, by_device, host_only):
        dist.destroy_process_group(each)
    assert sorted(cupy.cuda.nccl.DESTROYED) == sorted([1, world.size])


def test_groups_have_streams_of_their_own(world: Any, cupy: Any, group: Any, monkeypatch: Any) -> None:
    from mpiddp.device import nccl, stream

    other, used, kept = dist.new_group(backend="nccl"), [], set(stream._sides)
    monkeypatch.setattr(nccl.Communicator, "call", lambda self, name, x, y, stream, *op: used.append(stream.ptr))
    for each in (group, other, group):
        dist.all_reduce(cupy.ones(3), group=each)
    assert used[0] == used[2] != used[1], "in one, ranks that call in different orders wait for each other for ever"
    for each in (group, other):
        dist.destroy_process_group(each)
    assert set(stream._sides) == kept


def test_it_ends_with_the_default_group(world: Any, cupy: Any) -> None:
    dist.destroy_process_group()
    dist.init_process_group(backend="nccl")
    x = cupy.full((4,), 2.0)
    dist.all_reduce(x)
    assert (x.get() == 2 * world.size).all() and calls(cupy) == ["allReduce"]
    inherited = dist.new_group()
    assert dist.get_backend() == dist.get_backend(inherited) == "nccl"
    dist.destroy_process_group()
    assert cupy.cuda.nccl.DESTROYED.count(world.size) >= 1
    dist.init_process_group()
    assert dist.get_backend() == "mpi"


def test_a_group_that_is_given_up_aborts_its_communicator(world: Any, cupy: Any, group: Any) -> None:
    destroyed = list(cupy.cuda.nccl.DESTROYED)
    group._link.discard()
    dist.destroy_process_group(group)
    assert [world.size] == cupy.cuda.nccl.ABORTED
    assert destroyed == cupy.cuda.nccl.DESTROYED, "the other ranks may be gone"


def test_ddp_by_nccl(world: Any, cupy: Any, group: Any) -> None:
    nn.manual_seed(1)
    ddp = dist.DistributedDataParallel(nn.Linear(4, 3).convert(cupy.asarray), process_group=group)
    calls(cupy)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((world.size, 2, 4)).astype(np.float32)
    ddp(cupy.asarray(x[world.rank])).sum().backward()
    assert "allReduce" in calls(cupy)
    found = ddp.module.weight.grad.get()
    np.testing.assert_allclose(found, np.tile(x.sum(axis=(0, 1)) / world.size, (3, 1)), rtol=1e-5)


def expect_mpi(world: Any, xp: Any, why: str) -> None:
    """Ask for NCCL where it cannot be: the first rank warns, and the group works."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = dist.new_group(backend="nccl")
    texts = [str(each.message) for each in caught]
    expected = "backend 'nccl' gives 'mpi' in the group of all"
    assert [expected in text and why in text for text in texts] == [True] * (world.rank == 0), texts
    assert dist.get_backend(made) == "mpi"
    x = xp.ones(3)
    dist.all_reduce(x, group=made)
    assert (x == world.size).all()
    dist.destroy_process_group(made)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_share_a_gpu_keep_mpi(world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_UUID", "one")
    expect_mpi(world, cupy, "ranks 0 and 1 share a GPU")


def test_one_rank_without_it_is_everybodys(world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "available", world.rank != 0)
    expect_mpi(world, cupy, "CuPy cannot load the NCCL library: pip install nvidia-nccl")


def test_without_a_gpu_the_first_rank_warns(world: Any) -> None:
    if dist.is_nccl_available():
        pytest.skip("there is a GPU with NCCL")
    expect_mpi(world, np, "CuPy")


def test_deterministic_keeps_its_reductions_out(world: Any, cupy: Any, group: Any, choose: Any) -> None:
    choose(DETERMINISTIC="1")
    x = cupy.full((3,), world.rank + 1.0)
    dist.all_reduce(x, group=group)
    assert (x.get() == world.size * (world.size + 1) / 2).all() and calls(cupy) == []

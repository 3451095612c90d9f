"""Memory that the GPUs of a node share, on the fake device: given out, mapped, refused; several nodes and devices."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import device
from mpiddp.algorithms import plan
from mpiddp.algorithms.gpu import cuda_ipc, hierarchical, staged_ring
from mpiddp.algorithms.gpu.scratch import DeviceScratch
from mpiddp.device import ipc, pinned
from mpiddp.errors import MismatchError
from mpiddp.mpi import requests
from mpiddp.mpi.cuda_aware import DevicePointers
from mpiddp.mpi.link import Link
from mpiddp.shm import segment

from .inputs import OPS, close, draw, dtype_of, means_something
from .on_device import by_address, cupy, expected, own_op, renew, sizes
from .pretend import connect, pretended_nodes, release

pytestmark = pytest.mark.core

Array = Any
__all__ = ["by_address", "cupy"]  # fixtures


def test_dropped_memory_is_given_out_again(world: Any, cupy: Any) -> None:
    if world.size == 1:
        assert cuda_ipc.find(dist.symmetric_empty(5, device="cuda")) == segment.NOWHERE
        return
    group = dist.new_group()
    x = dist.symmetric_empty((3, 700), np.float32, group, "cuda")
    assert x.shape == (3, 700) and x.dtype == np.float32
    start, made = ipc.address(x), len(cupy._memory.MALLOCED)
    view = x[1:]
    del x
    gc.collect()
    other = dist.symmetric_empty(2100, np.float32, group, "cuda")
    assert ipc.address(other) != start, "a view is in use"
    del view
    gc.collect()
    again = dist.symmetric_empty(2000, np.float32, group, "cuda")
    assert ipc.address(again) == start
    assert len(cupy._memory.MALLOCED) == made + 1
    kept = again if world.rank == 0 else None
    del again, other
    gc.collect()
    last = dist.symmetric_empty(2000, np.float32, group, "cuda")
    assert kept is None or not cupy.may_share_memory(kept, last)
    last.fill(1)
    dist.all_reduce(last, group=group)
    assert (last.get() == world.size).all()
    dist.destroy_process_group(group)


def test_group_frees_its_memory(world: Any, cupy: Any) -> None:
    dist.all_reduce(cupy.ones(4000, np.float32))  # makes the default group's scratch
    opened, malloced = len(cupy._memory.OPENED), len(cupy._memory.MALLOCED)
    group = dist.new_group()
    x = dist.symmetric_empty(1000, np.float32, group, device="cuda")
    y = cupy.ones(4000, np.float32)
    dist.all_reduce(y, group=group)
    x.fill(world.rank)
    dist.destroy_process_group(group)
    assert len(cupy._memory.OPENED) == opened
    assert (x.get() == world.rank).all(), "own memory lives as long as an array in it"
    dist.all_reduce(x)
    assert (x.get() == sum(range(world.size))).all()
    del x
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    assert len(cupy._memory.MALLOCED) == malloced


def test_a_group_that_is_given_up_keeps_what_others_map(world: Any, cupy: Any) -> None:
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    opened = len(cupy._memory.OPENED)
    group = dist.new_group()
    x = dist.symmetric_empty(1000, np.float32, group, device="cuda")
    dist.all_reduce(cupy.ones(4000, np.float32), group=group)  # makes the scratch
    x.fill(world.rank)
    address, allocated = ipc.address(x), len(cupy._memory.MALLOCED)
    assert len(cupy._memory.OPENED) > opened and cuda_ipc.find(x) != segment.NOWHERE
    dist.barrier()
    group.link.discard()
    dist.destroy_process_group(group)
    assert len(cupy._memory.OPENED) == opened, "a peer's memory is still mapped"
    assert cuda_ipc.find(x) == segment.NOWHERE
    dist.all_reduce(x)
    assert (x.get() == sum(range(world.size))).all()
    del x
    gc.collect()
    assert len(cupy._memory.MALLOCED) == allocated and address in cupy._memory.MALLOCED


def test_sizes_that_differ(world: Any) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError, match="must be equal"):
        dist.symmetric_empty(10 + world.rank, device="cuda")
    renew()


def refuse(handle: bytes, number: int) -> int:
    raise RuntimeError("cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices")


def checked_everywhere(world: Any, cupy: Any, group: Any) -> None:
    for count in (3, 900, 9973):
        x = cupy.full(count, world.rank + 1.0, np.float32)
        dist.all_reduce(x, dist.ReduceOp.AVG, group)
        assert close(x.get(), np.full(count, (world.size + 1) / 2, np.float32))


@pytest.mark.parametrize("how", ["refused", "unreadable", "failing", "not pinned either"])
def test_without_ipc(world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """One rank that cannot map its peers is enough: all go by pinned memory of the node, or else by messages."""
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    strange = []

    def elsewhere(handle: bytes, number: int) -> int:  # maps, but something else
        strange.append(cupy.cuda.Memory(ipc.GRANULE_BYTES))
        monkeypatch.setattr(ipc, "close_handle", lambda start, number: None)
        return strange[-1].ptr

    def failing(step: Any, side: Any, trying: Any = cuda_ipc._fault_of) -> str:
        def fails() -> None:
            if step.__name__ == "write":
                raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorIllegalAddress")
            step()

        return trying(fails, side)

    if how == "failing" and world.rank == world.size - 1:
        monkeypatch.setattr(cuda_ipc, "_fault_of", failing)
    elif world.rank == world.size - 1:
        monkeypatch.setattr(ipc, "open_handle", elsewhere if how == "unreadable" else refuse)
        if how == "not pinned either":
            monkeypatch.setattr(pinned, "register", lambda start, nbytes: "operation not supported")
    group = dist.new_group()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = dist.symmetric_empty(900, np.float32, group, device="cuda")
    assert device.is_device_array(x) and cuda_ipc.find(x) == segment.NOWHERE
    assert len(told) == (world.rank == 0), [str(each.message) for each in told]
    checked_everywhere(world, cupy, group)
    scratch = group.link.resource(DeviceScratch)
    assert bool(scratch.fault) == (how == "not pinned either"), scratch.fault
    registered = len(cupy._memory.PINNED)
    dist.destroy_process_group(group)
    if how != "not pinned either":
        assert len(cupy._memory.PINNED) == registered - 1
    dist.barrier()


@contextlib.contextmanager
def on_nodes(world: Any, nodes: tuple[int, ...]) -> Iterator[Link]:
    """Give a link of the ranks that are on these nodes."""
    nodes = nodes[: world.size]
    if len(set(nodes)) == 1:
        pytest.skip("needs more ranks")
    link, _ = connect(nodes)
    yield link
    link.close()


NODES = [(0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("nodes", "kind"), [(nodes, "float32") for nodes in NODES] + [(NODES[0], "bfloat16"), (NODES[1], "int8")]
)
def test_several_nodes(world: Any, cupy: Any, nodes: tuple[int, ...], kind: str) -> None:
    """Ranks of a node share memory of their GPUs, and the slices that they sum there cross the nodes."""
    dtype = dtype_of(kind)
    with on_nodes(world, nodes) as link:
        for op, size in itertools.product(OPS, sizes(world, dtype)):
            if not means_something(op, dtype):
                continue
            xs = draw(world.rng, world.size, (size,), dtype)
            memory, fault = requests.drive(cuda_ipc.empty(link, size * dtype.itemsize))
            assert not fault and (memory is None) == (len(set(link.nodes)) == world.size)
            for x in [cupy.empty(size, dtype), *([] if memory is None else [memory.view(dtype)])]:
                x[...] = cupy.asarray(xs[world.rank])
                mine = own_op(op, world.rank)
                requests.drive(plan.make(link, "all_reduce", None, x, x, mine).steps(link, x, mine))
                assert close(x.get(), expected(op, xs)), (op, size)
            del x, memory


@pytest.mark.parametrize("nodes", NODES)
def test_which_way_over_several_nodes(
    world: Any, cupy: Any, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only slices cross the nodes, half types as float32; without memory to share, a ring goes around all ranks."""
    rings: list[tuple[int, str]] = []
    around = staged_ring.all_reduce

    def counted(link: Any, x: Array, op: dist.ReduceOp) -> Any:
        rings.append((x.size, x.dtype.name))
        return around(link, x, op)

    monkeypatch.setattr(staged_ring, "all_reduce", counted)
    with on_nodes(world, nodes) as link:
        places, shared = min(map(link.nodes.count, link.nodes)), len(set(link.nodes)) < world.size
        ranks = link.node.rank
        for refused in (False, True):
            if refused:
                release(link)
                monkeypatch.setattr(ipc, "open_handle", refuse)
                monkeypatch.setattr(pinned, "register", lambda start, nbytes: "operation not supported")
            x = cupy.full(3200, world.rank + 1, np.float16)
            steps = hierarchical.all_reduce if shared else staged_ring.all_reduce
            rings.clear()
            requests.drive(steps(link, x, dist.ReduceOp.AVG))
            assert (x.get() == np.float16((world.size + 1) / 2)).all()
            if not shared or (refused and max(map(link.nodes.count, link.nodes)) > 1):
                assert rings == [(3200, "float16")]
            else:
                assert rings == ([(3200 // places, "float32")] if ranks < places else [])


def test_half_types_over_nodes_are_rounded_once(world: Any, cupy: Any) -> None:
    with on_nodes(world, (0, 0, 1, 1)) as link:
        if world.size < 3:
            pytest.skip("needs a node of several ranks")
        x = cupy.full(3000, 1.0 if world.rank == 0 else 2.0**-12, np.float16)
        requests.drive(hierarchical.all_reduce(link, x, dist.ReduceOp.SUM))
        assert (x.get() == np.float16(1 + (world.size - 1) * 2.0**-12)).all()  # in float16, 1 + 2**-12 is 1


def test_several_on_their_way_over_nodes(world: Any, cupy: Any) -> None:
    """Ranks submit in one order and wait in others."""
    if world.size < 3:
        pytest.skip("needs a node of several ranks")
    orders = random.Random(world.rank)
    with pretended_nodes((0, 0, 1, 1)[: world.size]):
        for trial in range(3):
            same, running = random.Random(trial), []
            for _ in range(12):
                count, symmetric_one = same.choice([3, 900, 5000]), same.random() < 0.4
                x = dist.symmetric_empty(count, device="cuda") if symmetric_one else cupy.empty(count, np.float32)
                x.fill(world.rank + 1)
                running.append((dist.all_reduce(x, async_op=True), x))
            orders.shuffle(running)
            for each, x in running:
                each.wait()
                assert (x.get() == world.size * (world.size + 1) / 2).all()
        del running, each, x
        gc.collect()


def test_the_current_device_may_change_between_calls(world: Any, cupy: Any) -> None:
    """An array's place counts, and for a new one the device that was current when it was asked for."""
    total, home = world.size * (world.size + 1) / 2, cupy.cuda.runtime.getDevice()
    group, other = dist.new_group(), 1 - home
    first = dist.symmetric_empty(3000, np.float32, group, "cuda")
    y = cupy.full(9000, world.rank + 1.0)
    dist.all_reduce(y, group=group)  # makes the scratch
    with cupy.cuda.Device(other):
        second = dist.symmetric_empty(3000, np.float32, group, "cuda")
        z = cupy.full(9000, world.rank + 1.0)
        second.fill(world.rank + 1)
    assert (first.device.id, second.device.id) == (home, other)
    first.fill(world.rank + 1)
    with cupy.cuda.Device(world.rank % 2):
        works = [dist.all_reduce(x, group=group, async_op=True) for x in (first, second, z)]
    for each in works:
        each.wait()
    dist.all_reduce(z, dist.ReduceOp.AVG, group)
    for x, value in ((first, total), (second, total), (z, total), (y, total)):
        assert (x.get() == value).all()
    del first, second, x, works, each
    gc.collect()
    with cupy.cuda.Device(other):
        assert dist.symmetric_empty(3000, np.float32, group, "cuda").device.id == other
    dist.destroy_process_group(group)


def lists_over_devices(world: Any, cupy: Any) -> None:
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


def test_lists_over_devices(world: Any, cupy: Any) -> None:
    lists_over_devices(world, cupy)


def test_lists_over_devices_by_address(world: Any, cupy: Any, by_address: DevicePointers) -> None:
    if world.size > 1:  # one rank copies with kernels of its own
        lists_over_devices(world, cupy)

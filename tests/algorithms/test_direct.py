"""Longer arrays of a node, moved where they lie: by every way, in every mixture, beside NumPy."""

import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from harness.collectives import check

import mpiddp as dist
from mpiddp.algorithms import direct, one_shot, ways
from mpiddp.distributed.groups import default_group
from mpiddp.errors import DistError
from mpiddp.mpi.link import Link
from mpiddp.shm.cma import CrossMemory, UnreachableError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

COUNT = 300_007
MOVING = ("all_gather_single", "broadcast")
NAMES = (*MOVING, "all_reduce", "reduce", "reduce_scatter_single")


@pytest.fixture
def link(world: Any, eager_buffers: None) -> Link:
    link = default_group()._link
    dist.all_reduce(np.zeros(COUNT))  # asks for the memory of all ways
    return link


def fix(group: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all calls go one way."""
    choice = ways.Choice(group._link)
    choice.way = way
    monkeypatch.setattr(group._link.resource(ways.Ways), "of", lambda kind: choice)
    group._plans.forget()


@pytest.mark.parametrize("way", ["attach", "scratch", "native", "tried", "pieces"])
def test_random_calls_have_numpy_s_results(world: Any, link: Link, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "attach" and link.resource(CrossMemory).fault:
        pytest.skip("the kernel does not copy between processes here")
    if way != "tried":
        fix(default_group(), way, monkeypatch)
    counts = {"tried": (300_000, 700_000), "pieces": (70_000, 260_000)}.get(way, (140_000, 300_000))
    alike, me = np.random.default_rng(7), link.rank
    for step in range(16):
        count, owner, memory = int(alike.integers(*counts)), int(alike.integers(link.size)), alike.integers(4)

        def make(x: Any, owner: int = owner, memory: int = memory) -> Any:
            """Return a copy: an ordinary one twice, a symmetric one, or one that is symmetric on one rank."""
            made = dist.symmetric_empty(x.shape, x.dtype) if memory > 1 else np.empty_like(x)
            made = np.empty_like(x) if memory == 3 and me != owner else made
            made[...] = x
            return made

        name = str(alike.choice(NAMES))
        op = dist.ReduceOp.PREMUL_SUM(0.5) if memory == 1 and name == "all_reduce" else dist.ReduceOp.SUM
        if name.startswith("reduce_scatter"):
            count //= link.size
        how = {"async_op": True} if alike.integers(2) and (me + step) % 2 else {}
        if way != "native" or name in MOVING:
            check(world, name, np.dtype(np.float32), (count,), how, op=op, make=make)


def test_array_of_a_call_that_failed_is_kept(link: Link, alert: None) -> None:
    """Another rank may still write to it."""
    if link.resource(CrossMemory).fault:
        pytest.skip("the kernel does not copy between processes here")
    group = dist.new_group(timeout=0.3)
    dist.barrier()
    if link.rank == 0:
        x = np.zeros(COUNT)
        kept = weakref.ref(x)
        with pytest.raises(DistError, match="did not finish in"):
            dist.all_reduce(x, group=group)
        del x
        gc.collect()
        assert kept() is not None
    dist.barrier()
    with contextlib.suppress(DistError):  # the ranks' last calls differ
        dist.destroy_process_group(group)
    one_shot._abandoned.clear()


def test_memory_that_is_gone_ends_the_call_with_an_error(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object) -> None:
        raise UnreachableError("gone")

    group = dist.new_group()
    if link.resource(CrossMemory).fault:
        pytest.skip("the kernel does not copy between processes here")
    dist.all_reduce(np.zeros(COUNT), group=group)
    fix(group, "attach", monkeypatch)
    monkeypatch.setattr(direct.Copies, "reduce_for", gone)
    for async_op in (False, True):
        with pytest.raises(UnreachableError, match="gone"):
            work = dist.all_reduce(np.zeros(COUNT), group=group, async_op=async_op)
            work.wait()
    x = np.zeros(COUNT)
    kept = weakref.ref(x)
    with pytest.raises(UnreachableError, match="gone"):
        dist.all_reduce(x, group=group, algorithm="attach")
    del x
    gc.collect()
    assert kept() is not None, "another rank may still write to it"

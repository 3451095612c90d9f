"""The two shots through pinned memory, on the fake device."""

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
from harness.inputs import draw, reduced
from harness.on_device import cupy
from harness.world import everybody

import mpiddp as dist
from mpiddp.algorithms.gpu import staged_two_shot
from mpiddp.errors import MismatchError

pytestmark = pytest.mark.mpi(min_size=2)

__all__ = ["cupy"]  # a fixture


def test_pieces_of_all_lengths_follow_each_other(world: Any, cupy: Any) -> None:
    """A rank may still read the sum of a long piece while another one writes a shorter piece to the same slots."""
    works = []
    for length in world.rng.integers(1_000, 6_000, 12).tolist():
        xs = draw(world.rng, world.size, (length,), np.dtype(np.int64))
        works.append((dist.all_reduce(x := cupy.asarray(xs[world.rank]), async_op=True), x, xs))
    for work, x, xs in works:
        work.wait()
        assert (x.get() == reduced(dist.ReduceOp.SUM, xs)).all()


def test_a_rank_that_cannot_pin_shared_memory_leaves_the_ring(
    world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on behind the program's kernels, on whichever stream they were."""

    def refuse(*_: object) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotSupported")

    if world.rank == 1:
        monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", refuse)
    group = dist.new_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            with cupy.cuda.Stream(non_blocking=True):
                x = cupy.zeros(5000, np.float32)
                for _ in range(20):
                    x += world.rank
                work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()
            assert (x.get() == 10 * world.size * (world.size - 1)).all()
    told = [str(each.message) for each in caught if "take the ring" in str(each.message)]
    assert len(told) == (world.rank == 1) and all("cudaErrorNotSupported" in each for each in told)
    fault = group._link[staged_two_shot.Landing].fault
    assert ("cudaErrorNotSupported" if world.rank == 1 else "another rank") in fault
    dist.destroy_process_group(group)


def test_calls_that_differ_raise_on_all_ranks_and_the_group_goes_on(world: Any, cupy: Any) -> None:
    group = dist.new_group()
    for different in (5001, 0, 5002):
        x = cupy.full(5000 + different * (world.rank == 1), world.rank, np.float32)
        with pytest.raises(MismatchError) if different else contextlib.nullcontext():
            dist.all_reduce(x, group=group)
        assert different or (x.get() == world.size * (world.size - 1) / 2).all()
    dist.destroy_process_group(group)


def test_the_call_after_one_that_failed_here_is_not_taken_for_it(
    world: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, reduce_rows, calls = dist.new_group(), staged_two_shot.reduce_rows, []

    def fail_once(*args: Any) -> None:
        calls.append(args)
        if world.rank == 1 and len(calls) == 2:
            raise MemoryError("the device is full")
        reduce_rows(*args)

    monkeypatch.setattr(staged_two_shot, "reduce_rows", fail_once)
    x, y = (cupy.full(5000, world.rank + 1, np.float32) for _ in range(2))
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (x, y)]
    with pytest.raises(MemoryError if world.rank == 1 else MismatchError, match=r"is full|has left this all_reduce"):
        for work in works:
            work.wait(timeout=5)
    everybody(True)  # until all have raised
    group._link.discard()

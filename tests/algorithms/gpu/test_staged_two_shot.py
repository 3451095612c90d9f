"""The two shots through pinned memory, on the fake device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness.inputs import draw, reduced
from harness.on_device import cupy

import mpiddp as dist
from mpiddp.algorithms.gpu import staged_two_shot

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3), pytest.mark.core]

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
    def refuse(*_: object) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotSupported")

    if world.rank == 1:
        monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", refuse)
    group = dist.new_group()
    for _ in range(2):
        dist.all_reduce(x := cupy.full(5000, world.rank, np.float32), group=group)
        assert (x.get() == world.size * (world.size - 1) / 2).all()
    fault = group._link[staged_two_shot.Landing].fault
    assert ("cudaErrorNotSupported" if world.rank == 1 else "another rank") in fault
    dist.destroy_process_group(group)

"""The end of a program: what it begins in MPI."""

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpiddp.faults.leaving import Leaving


def test_memory_of_a_barrier_that_has_failed_is_kept() -> None:
    memory = []

    def fail() -> None:
        raise RuntimeError("a rank has failed")

    def begin_end(comm: object) -> Any:
        memory.append(weakref.ref(total := np.zeros(1)))
        return SimpleNamespace(Test=fail), total

    world = SimpleNamespace(rank=0, size=2, comm=None)
    failures, between_nodes = SimpleNamespace(caused=lambda error: True), SimpleNamespace(begin_end=begin_end)
    leaving = object.__new__(Leaving)
    leaving._begun = []
    job: Any = SimpleNamespace(world=world, liveness=SimpleNamespace(), failures=failures, between_nodes=between_nodes)
    assert not leaving._wait(job, 60.0)
    assert memory[0]() is not None

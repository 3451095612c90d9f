"""Slots receive samples of another rank."""

import time
from typing import Any

import numpy as np
import pytest

from mpiddp.data.slots import Slots
from mpiddp.mpi import lazy

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2)
def test_a_signal_s_handler_that_raises_loses_no_sample() -> None:
    comm, dtype = lazy.MPI.COMM_WORLD, np.dtype([("x", "i8")])
    sizes = [8, 8, 4, 8, 8]
    if comm.size == 1:
        pytest.skip("there is no rank that sends")
    if comm.rank:
        for number, size_bytes in enumerate(sizes if comm.rank == 1 else ()):
            comm.Send([np.full(1, number), size_bytes, lazy.MPI.BYTE], 0, 7)
        comm.Barrier()
        return
    slots = Slots(comm, 7, dtype, 12, 5)
    slots.post()
    interrupted = []
    for slot, test in enumerate(slots._tests):  # the handler runs when the test has returned

        def interrupting(status: object, slot: int = slot, test: Any = test) -> bool:
            done: bool = test(status)
            if slot not in interrupted and (done or slot % 2):
                interrupted.append(slot)
                raise KeyboardInterrupt
            return done

        slots._tests[slot] = interrupting
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + 10
    while len(found) < len(sizes) and time.monotonic() < deadline:
        try:
            at, sources, last = slots.arrived()
        except KeyboardInterrupt:
            continue
        told = [8] * len(at)
        told[-1:] = [last] * bool(at)
        assert sources == [1] * len(at)
        found += zip(told, slots.samples["x"][at].tolist(), strict=True)
        slots.free += at
        slots.post()
    comm.Barrier()
    slots.close()
    assert [size_bytes for size_bytes, _ in found] == sizes and len(interrupted) >= len(sizes)
    assert [number for size_bytes, number in found if size_bytes == 8] == [0, 1, 3, 4]

"""Slots receive samples of another rank."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpiddp.data.slots import TOO_LONG, Slots
from mpiddp.mpi import lazy

pytestmark = pytest.mark.mpi

DTYPE = np.dtype([("x", "f4", 3), ("step", "i8")])


def arrived(slots: Slots, count: int) -> tuple[list[int], list[int], list[int]]:
    found: tuple[list[int], list[int], list[int]] = [], [], []
    deadline = time.monotonic() + 10
    while len(found[0]) < count and time.monotonic() < deadline:
        for all_, new in zip(found, slots.arrived(), strict=True):
            all_ += new
    return found


@pytest.mark.ranks(2, 3)
def test_samples_come_in_their_order_and_say_how_long_they_are() -> None:
    comm = lazy.MPI.COMM_WORLD
    samples = np.zeros(2, DTYPE)
    samples["x"], samples["step"] = [[1, 2, 3], [4, 5, 6]], [8, 9]
    if comm.rank:
        comm.Barrier()
        for each in (samples[:1], samples[1:], np.zeros(DTYPE.itemsize + 1, np.uint8)):
            if comm.rank == 1:
                comm.Send([each, lazy.MPI.BYTE], 0, 7)
        return
    slots = Slots(comm, 7, DTYPE, 4)
    slots.post(3)
    assert slots.arrived() == ([], [], []) and len(slots.free) == 1
    comm.Barrier()
    at, sources, sizes = arrived(slots, 3)
    assert sources == [1, 1, 1] and sizes == [DTYPE.itemsize, DTYPE.itemsize, TOO_LONG]
    assert len(set(at)) == 3 and slots.samples[at[:2]].tobytes() == samples.tobytes()
    slots.close()
    assert slots.arrived() == ([], [], [])

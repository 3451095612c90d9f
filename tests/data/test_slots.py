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
    """Return slots, sources and sizes of ``count`` samples."""
    found: tuple[list[int], list[int], list[int]] = [], [], []
    deadline = time.monotonic() + 10
    while len(found[0]) < count and time.monotonic() < deadline:
        new, sources, last = slots.arrived()
        sizes = [DTYPE.itemsize] * len(new)
        sizes[-1:] = [last] * bool(new)
        for all_, each in zip(found, (new, sources, sizes), strict=True):
            all_ += each
    return found


@pytest.mark.ranks(2, 3)
def test_samples_come_in_their_order_and_say_how_long_they_are() -> None:
    comm = lazy.MPI.COMM_WORLD
    samples = np.zeros(2, DTYPE)
    samples["x"], samples["step"] = [[1, 2, 3], [4, 5, 6]], [8, 9]
    if comm.rank:
        comm.Barrier()
        for each in (samples[:1], samples[1:], np.zeros(4, np.uint8), np.zeros(DTYPE.itemsize + 1, np.uint8)):
            if comm.rank == 1:
                comm.Send([each, lazy.MPI.BYTE], 0, 7)
        return
    slots = Slots(comm, 7, DTYPE, 5)
    slots.post(4)
    assert slots.arrived()[:2] == ([], []) and len(slots.free) == 1
    comm.Barrier()
    at, sources, sizes = arrived(slots, 4)
    assert sources == [1] * 4 and sizes == [DTYPE.itemsize, DTYPE.itemsize, 4, TOO_LONG]
    assert len(set(at)) == 4 and slots.samples[at[:2]].tobytes() == samples.tobytes()
    slots.close()
    assert slots.arrived()[:2] == ([], [])

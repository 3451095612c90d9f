"""Slots receive samples of another rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness.launcher import is_open_mpi

from mpiddp.data.slots import TOO_LONG, Slots
from mpiddp.mpi import lazy

pytestmark = pytest.mark.mpi


def arrived(slots: Slots, count: int) -> tuple[list[int], list[int], list[int]]:
    """Return slots, sources and sizes of ``count`` samples."""
    found: tuple[list[int], list[int], list[int]] = [], [], []
    deadline = time.monotonic() + 10
    while len(found[0]) < count and time.monotonic() < deadline:
        new, sources, last = slots.arrived()
        sizes = [slots.bytes.shape[1]] * len(new)
        sizes[-1:] = [last] * bool(new)
        for all_, each in zip(found, (new, sources, sizes), strict=True):
            all_ += each
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("length", [3, 1250])
def test_samples_come_in_their_order_and_say_how_long_they_are(length: int) -> None:
    comm, dtype = lazy.MPI.COMM_WORLD, np.dtype([("x", "f4", length), ("step", "i8")])
    if comm.size == 1:
        pytest.skip("there is no rank that sends")
    size, good = dtype.itemsize, np.zeros(3, dtype)
    good["x"], good["step"] = [[1], [4], [7]], [8, 9, 10]
    wrong = [np.full(n, 5, np.uint8) for n in (4, size + 1, size + 100_000, 0)]
    if comm.rank:
        comm.Barrier()
        for each in (good[:1], good[1:2], *wrong, good[2:]):
            if comm.rank == 1:
                comm.Send([each, lazy.MPI.BYTE], 0, 7)
        comm.Barrier()
        return
    slots = Slots(comm, 7, dtype, 12, 6)
    slots.bytes[...] = 77
    slots.post()
    assert slots.arrived()[:2] == ([], []) and len(slots.free) == 6
    comm.Barrier()
    at, sources, sizes = arrived(slots, 6)
    assert sources == [1] * 6 and sizes[:3] == [size, size, 4] and sizes[5] == 0
    assert sizes[3] in (TOO_LONG, size + 1) and sizes[4] in (TOO_LONG, size + 100_000)
    assert len(set(at)) == 6 and slots.overrun == is_open_mpi()
    if not slots.overrun:
        assert slots.samples[at[:2]].tobytes() == good[:2].tobytes() and (slots.bytes[slots.free] == 77).all()
    slots.free += at[2:]
    slots.post()  # also into the slots of wrong ones
    at, *told = arrived(slots, 1)
    assert told == [[1], [size]] and slots.samples[at].tobytes() == good[2:].tobytes()
    comm.Barrier()
    slots.close()
    assert slots.arrived()[:2] == ([], [])

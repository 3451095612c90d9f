"""Slots receive samples of another rank."""

from __future__ import annotations

import time
from typing import Any

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

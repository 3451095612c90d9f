"""The job that gives device pointers to MPI and looks what becomes of them: `probe` starts it, and it may crash.

Rank 0 says a JSON object a line: first which library it is that is tried, then whether all values were right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpiddp import device, settings
from mpiddp.typing import Array

from . import probe
from .library import MPI
from .verdict import KINDS

# Eager, rendezvous, and what is cut into pieces on its way.
_LENGTHS = (1, 3_001, 200_003, 3_000_017)
_KINDS = (np.float32, np.float64, np.int64)

Check = Iterator[tuple[str, Array, Any]]
"""What was tried, the array that came out of it, and what its elements have to be."""


def point_to_point(comm: MPI.Intracomm, array: Callable[[Any], Array]) -> Check:
    """Send to the next rank and receive from the one before, whole arrays and parts of them."""
    onward, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in _LENGTHS:
        numbers = np.arange(length, dtype=np.float32)
        for first in (0, length // 3):
            x, y = array(numbers + comm.rank), array(numbers * 0)
            device.synchronize()
            MPI.Request.Waitall([comm.Irecv(y[first:], back), comm.Isend(x[first:], onward)])
            yield f"{length - first} float32 from rank {back}", y[first:], (numbers + back)[first:]


def collectives(comm: MPI.Intracomm, array: Callable[[Any], Array]) -> Check:
    """Broadcast, gather, exchange and reduce, not blocking: what the package's algorithms use."""
    for kind in _KINDS:
        for length in _LENGTHS:
            numbers = (np.arange(length) % 1000).astype(kind)
            what = f"of {length} {np.dtype(kind)}"
            x = array(numbers + comm.rank)
            device.synchronize()
            comm.Ibcast(x, root=comm.size - 1).Wait()
            yield f"Ibcast {what}", x, numbers + comm.size - 1

            mine, all_of_them = array(numbers + comm.rank), array(np.zeros((comm.size, length), kind))
            device.synchronize()
            comm.Iallgather(mine, all_of_them).Wait()
            rows = np.stack([numbers + rank for rank in range(comm.size)])
            yield f"Iallgather {what}", all_of_them, rows

            exchanged = array(np.zeros((comm.size, length), kind))
            device.synchronize()
            comm.Ialltoall(all_of_them, exchanged).Wait()
            yield f"Ialltoall {what}", exchanged, np.stack([numbers + comm.rank] * comm.size)

            x = array(numbers + comm.rank)
            device.synchronize()
            comm.Iallreduce(MPI.IN_PLACE, x, op=MPI.SUM).Wait()
            yield f"Iallreduce {what}", x, rows.sum(axis=0)

            x, part = array(rows), array(np.zeros(length, kind))
            device.synchronize()
            comm.Ireduce_scatter_block(x, part, op=MPI.MAX).Wait()
            yield f"Ireduce_scatter_block {what}", part, rows[comm.rank]


def main(kind: str) -> int:
    """Try one kind, and return the exit code."""
    announced = settings.launch()
    fault, count = device.cuda_fault(), device.device_count()
    if count:  # before MPI, which may look at the device when it starts
        device.set_device((announced.local_rank or 0) % count if announced else 0)
    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)  # an exception on one rank would leave the other waiting
    _say(comm, library=probe.library_key())
    if comm.size != probe.RANKS:
        fault = f"it runs on {comm.size} ranks instead of {probe.RANKS}: the launcher does not belong to the library"
    faults = [text for text in comm.allgather(fault) if text]
    if faults:
        _say(comm, fault=faults[0])
        return 1
    check = {"point_to_point": point_to_point, "collectives": collectives}[kind]
    wrong = None
    for what, found, expected in check(comm, device.upload):
        if wrong is None and not np.array_equal(device.download(found), expected):
            wrong = f"{what} on rank {comm.rank}"
    texts = [text for text in comm.allgather(wrong) if text]
    _say(comm, **({"wrong": texts[0]} if texts else {"right": kind}))
    return 0


def _say(comm: MPI.Intracomm, **what: str) -> None:
    if comm.rank == 0:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    assert len(sys.argv) == 2 and sys.argv[1] in KINDS, "probe names the kind"
    sys.exit(main(sys.argv[1]))

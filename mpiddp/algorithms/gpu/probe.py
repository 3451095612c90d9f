"""The probe's job (see `mpi.probe`), which may crash.

Rank 0 writes JSON lines: the library, that the trial begins, and its outcome.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpiddp import device, launchers
from mpiddp.faults import monitor, this_job
from mpiddp.mpi import p2p_device, probe
from mpiddp.mpi.cuda_aware import KINDS, library_key
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.p2p import Mailbox, code_of
from mpiddp.mpi.reduction import REDUCTIONS, ReduceOp, check, mpi_op
from mpiddp.mpi.requests import drive
from mpiddp.typing import Array

from . import pointers, ring

_SHORT = (1, 3_001)
_LONG = (200_003, 3_000_017)
"""Numbers of elements. MPI sends short messages at once; long ones it announces or cuts."""
_DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64", "complex64")
_OPS = (*(op for op in REDUCTIONS if op.name not in ("PREMUL_SUM", "EXACT_SUM")), ReduceOp.PREMUL_SUM(0.5))

Check = Iterator[tuple[str, Array, Any]]


def _rows(link: Link, length: int, dtype: str = "float32") -> list[np.ndarray[Any, Any]]:
    """Return each rank's array, of small numbers whose sums and products are exact."""
    return [((np.arange(length) + rank) % 3).astype(dtype) for rank in range(link.size)]


def point_to_point(link: Link) -> Check:
    p2p_device.by_address = True
    rank, onward, back = link.rank, (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for length in (*_SHORT, *_LONG):
        xs = _rows(link, length)
        for first in (0, length // 3):
            x, y = device.upload(xs[rank]), device.upload(xs[rank] * 0)
            what = Operation(Call(link.members, "the probe", peers=()))
            code = code_of(x, 0)
            receiving = link.resource(Mailbox).irecv(y[first:], back, code, what)
            link.resource(Mailbox).isend(x[first:], onward, code, what).wait()
            receiving.wait()
            yield f"isend and irecv of {length - first} float32", y[first:], xs[back][first:]
        y = device.upload(xs[rank] * 0)
        for sender in range(link.size):
            if rank == sender:
                link.resource(Mailbox).isend(x, onward, code, what).wait()
            elif rank == (sender + 1) % link.size:
                link.resource(Mailbox).irecv(y, back, code, what).wait()
        yield f"send and recv of {length} float32", y, xs[back]
        if length != _LONG[-1]:
            yield from _blocks(link, xs)
    for dtype in ("bool", "float16", "float32", "int64"):
        xs = _rows(link, _LONG[0], dtype)
        x = device.upload(xs[rank])
        drive(ring.all_reduce(link, x, ReduceOp.SUM))
        yield f"a ring of {x.size} {dtype}", x, functools.reduce(np.add, xs)


def _blocks(link: Link, xs: list[np.ndarray[Any, Any]]) -> Check:
    rank, what = link.rank, f"of {xs[0].size} float32"
    x, stacked = device.upload(xs[rank]), np.stack(xs)

    def empty() -> Array:
        return device.upload(stacked * 0)

    found = empty()
    drive(pointers.all_gather(link, found, x))
    yield f"all_gather {what}", found, stacked
    found = empty()
    drive(pointers.gather(link, list(found) if rank == 0 else None, x, 0))
    yield f"gather {what}", found, stacked if rank == 0 else stacked * 0
    found = device.upload(xs[0] * 0)
    drive(pointers.scatter(link, found, list(device.upload(stacked)) if rank == 0 else None, 0))
    yield f"scatter {what}", found, xs[rank]
    found = empty()
    drive(pointers.all_to_all(link, list(found), [x] * link.size))
    yield f"all_to_all {what}", found, stacked
    found, counts = empty(), [x.nbytes] * link.size
    drive(pointers.all_to_all_single(link, found, device.upload(np.stack([xs[rank]] * link.size)), counts, counts))
    yield f"all_to_all_single {what}", found, stacked


def collectives(link: Link) -> Check:
    for dtype in _DTYPES:
        for length in (*_SHORT, *(_LONG if dtype == "float32" else ())):
            xs = _rows(link, length, dtype)
            x = device.upload(xs[link.rank])
            drive(pointers.broadcast(link, x, link.size - 1))
            yield f"broadcast of {length} {dtype}", x, xs[-1]
            for op in _OPS if length in _SHORT else _OPS[:1]:
                if _is_used(np.dtype(dtype), op):
                    yield from _reductions(link, xs, op)


def _is_used(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    try:
        check(dtype, op)
    except TypeError:
        return False
    return mpi_op(dtype, op) is not None


def _reductions(link: Link, xs: list[np.ndarray[Any, Any]], op: ReduceOp) -> Check:
    rank, root, what = link.rank, link.size - 1, f"{op} of {xs[0].size} {xs[0].dtype}"
    scaled = [x if op.factor is None else x * x.dtype.type(op.factor) for x in xs]
    total = functools.reduce(getattr(np, op._combining), scaled)
    if op.name == "AVG":
        total = total / total.dtype.type(link.size)
    x = device.upload(xs[rank])
    drive(pointers.all_reduce(link, x, op))
    yield f"all_reduce {what}", x, total
    x = device.upload(xs[rank])
    drive(pointers.reduce(link, x, root, op))
    yield f"reduce {what}", x, total if rank == root else xs[rank]
    blocks, part = device.upload(np.stack([xs[rank]] * link.size)), device.upload(xs[rank] * xs[rank].dtype.type(0))
    drive(pointers.reduce_scatter(link, part, blocks, op))
    yield f"reduce_scatter {what}", part, total


def main(kind: str) -> int:
    announced = launchers.launch()
    fault, count = device.cuda_fault(), device.device_count()
    if count:  # before MPI, which may use the device when it starts
        device.set_device((announced.local_rank or 0) % count if announced else 0)
    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)  # if one rank raised, the other would wait
    _say(comm, library=library_key())
    if comm.size != probe.RANKS:
        fault = f"it runs on {comm.size} ranks instead of {probe.RANKS}: the launcher does not belong to the library"
    faults = [text for text in comm.allgather(fault) if text]
    if faults:
        _say(comm, fault=faults[0])
        return 1
    job = this_job.start()
    link, _ = monitor.connect(job, job.world.comm.Dup(), probe.LIMIT_S)
    _say(comm, tries=kind, nodes=link.node_count)
    tried: dict[str, Callable[[Link], Check]] = {"point_to_point": point_to_point, "collectives": collectives}
    wrong = None
    for what, found, expected in tried[kind](link):
        if wrong is None and not np.array_equal(device.download(found), expected):
            wrong = f"{what} on rank {comm.rank}"
    texts = [text for text in comm.allgather(wrong) if text]
    _say(comm, **({"wrong": texts[0]} if texts else {"right": kind}))
    return 0


def _say(comm: MPI.Intracomm, **what: object) -> None:
    if comm.rank == 0:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    assert len(sys.argv) == 2 and sys.argv[1] in KINDS, "probe names the kind"
    sys.exit(main(sys.argv[1]))

"""The job of ``info --probe-gpu`` (see `mpi.probe`), which may crash: calls on GPU arrays, compared with the host's.

Rank 0 writes JSON lines: the library, that the trial begins, and its outcome.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import numpy as np

import mpiddp.distributed as dist
from mpiddp import device, launchers
from mpiddp.device import array_namespace, is_device_array
from mpiddp.distributed.groups import default_group
from mpiddp.mpi import probe
from mpiddp.mpi.cuda_aware import KINDS, library_key
from mpiddp.mpi.reduction import REDUCTIONS, check
from mpiddp.typing import Array

from .ranks import of_any_rank

_SHORT = (1, 3_001)
_LONG = (200_003, 3_000_017)
"""Numbers of elements. MPI sends short messages at once; long ones it announces or cuts."""
_DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64", "complex64")
_OPS = (*(op for op in REDUCTIONS if op.name not in ("PREMUL_SUM", "EXACT_SUM")), dist.ReduceOp.PREMUL_SUM(0.5))
_KINDS = {
    "point_to_point": [
        *((length, "float32") for length in (*_SHORT, *_LONG)),
        *((_LONG[0], dtype) for dtype in ("bool", "float16", "int64")),
    ],
    "collectives": [
        *((length, dtype) for dtype in _DTYPES for length in _SHORT),
        *((length, "float32") for length in _LONG),
    ],
}
"""For each kind of communication the lengths and dtypes of the arrays."""


def _point_to_point(x: Array) -> Iterator[tuple[str, Array]]:
    xp, rank = array_namespace(x), dist.get_rank()
    for first in (0, x.size // 3):
        found = xp.zeros_like(x)
        works = dist.irecv(found[first:], 1 - rank), dist.isend(x[first:], 1 - rank)
        for work in works:
            assert work is not None
            work.wait()
        yield f"isend and irecv from element {first} on", found
    for sender in (0, 1):
        if rank == sender:
            dist.send(x, 1 - rank)
        else:
            dist.recv(found, sender)
    yield "send and recv", found
    blocks, is_root = xp.stack([x, x[::-1]]), rank == 0
    dist.all_gather_single(found := xp.zeros_like(blocks), x)
    yield "all_gather", found
    dist.gather(x, list(found := xp.zeros_like(blocks)) if is_root else None)
    yield "gather", found if is_root else x
    dist.scatter(found := xp.zeros_like(x), list(blocks) if is_root else None)
    yield "scatter", found
    dist.all_to_all(list(found := xp.zeros_like(blocks)), list(blocks))
    yield "all_to_all", found
    dist.all_to_all_single(found := xp.zeros_like(blocks), blocks)
    yield "all_to_all_single", found
    dist.all_reduce(found := x.copy(), algorithm="device_ring" if is_device_array(x) else None)
    yield "a ring", found


def _collectives(x: Array) -> Iterator[tuple[str, Array]]:
    xp = array_namespace(x)
    dist.broadcast(found := x.copy(), 1)
    yield "broadcast", found
    for op in _OPS if x.size in _SHORT else _OPS[:1]:
        try:
            check(x.dtype, op)
        except TypeError:
            continue
        dist.all_reduce(found := x.copy(), op)
        yield f"all_reduce with {op}", found
        dist.reduce(found := x.copy(), 1, op)
        yield f"reduce with {op}", found
        dist.reduce_scatter_single(found := xp.zeros_like(x), xp.stack([x, x[::-1]]), op)
        yield f"reduce_scatter with {op}", found


def _wrong(kind: str) -> str | None:
    """Try all of a kind; return the first call whose result differs on this rank."""
    calls, wrong = {"point_to_point": _point_to_point, "collectives": _collectives}[kind], None
    for length, dtype in _KINDS[kind]:
        x = ((np.arange(length) + dist.get_rank()) % 3).astype(dtype)  # sums and products are exact
        for (what, found), (_, expected) in zip(calls(device.upload(x)), calls(x), strict=True):
            if wrong is None and not np.array_equal(device.download(found), expected):
                wrong = f"{what} of {length} {dtype} on rank {dist.get_rank()}"
    return wrong


def main(kind: str) -> int:
    os.environ["MPIDDP_CUDA_AWARE"] = "1"
    for name in ("MPIDDP_ALGORITHM", "MPIDDP_DETERMINISTIC"):  # they may keep calls from device pointers
        os.environ.pop(name, None)
    announced, count, fault = launchers.launch(), device.device_count(), device.cuda_fault()
    local_rank = 0 if announced is None else announced.local_rank or 0
    dist.init_process_group(device_id=local_rank % count if count else None, timeout=probe.LIMIT_S)
    _say(library=library_key())
    if dist.get_world_size() != probe.RANKS:
        fault = f"it runs on other than {probe.RANKS} ranks: the launcher does not belong to the library"
    fault = of_any_rank(fault)
    if fault is not None:
        _say(fault=fault)
        return 1
    _say(tries=kind, nodes=default_group()._link.node_count)
    wrong = of_any_rank(_wrong(kind))
    _say(**({"right": kind} if wrong is None else {"wrong": wrong}))
    return 0


def _say(**what: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    assert len(sys.argv) == 2 and sys.argv[1] in KINDS, "probe names the kind"
    sys.exit(main(sys.argv[1]))

# ruff: noqa: N802 - CuPy's names
"""``cupy.cuda.nccl`` of the fake device: what NCCL would do is done by MPI, as late as a stream does its work."""

import ctypes
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import _late

available = True
CALLS: list[tuple[str, int, str]] = []
"""The calls of this process: name, count of elements, dtype."""
DESTROYED: list[int] = []
"""Sizes of the communicators that were destroyed."""
ABORTED: list[int] = []
"""Sizes of the communicators that were aborted."""
_KINDS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
for _number, _name in enumerate(_KINDS):
    globals()[f"NCCL_{_name.upper()}"] = _number
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
_FOLDS = (np.add, np.multiply, np.maximum, np.minimum)


def get_unique_id() -> bytes:
    """Return the name of a folder where the ranks meet."""
    return tempfile.mkdtemp(prefix="mpiddp-fake-nccl-").encode()


def _array(pointer: int, count: int, kind: int) -> np.ndarray:
    name = _KINDS[kind]
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    memory = (ctypes.c_char * max(count * dtype.itemsize, 1)).from_address(pointer)
    return np.frombuffer(memory, dtype, count)


class NcclCommunicator:
    """Ranks that have met in the folder of an id."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        from mpi4py import MPI

        folder, world = Path(commId.decode()), MPI.COMM_WORLD
        (folder / f".{rank}").write_text(str(world.rank))
        (folder / f".{rank}").replace(folder / str(rank))
        end = time.monotonic() + 30
        while not all((folder / str(each)).exists() for each in range(ndev)):
            assert time.monotonic() < end, "not all ranks have come"
            time.sleep(0.001)
        ranks = [int((folder / str(each)).read_text()) for each in range(ndev)]
        self._comm = world.Create_group(world.Get_group().Incl(ranks), 7)
        self._comm.Barrier()  # everybody has read
        if rank == 0:
            shutil.rmtree(folder)
        self._size, self._rank = ndev, rank

    def _queue(self, name: str, count: int, kind: int, stream: int, work: Any) -> None:
        CALLS.append((name, count, _KINDS[kind]))
        _late.stream_at(stream).put("run", work)

    def _rows(self, x: np.ndarray) -> np.ndarray:
        rows = np.empty((self._size, x.nbytes), np.uint8)
        self._comm.Allgather(np.ascontiguousarray(x).view(np.uint8), rows)
        return rows.view(x.dtype)

    def _folded(self, x: np.ndarray, op: int) -> np.ndarray:
        rows = self._rows(x)
        total = rows[0].astype(np.float32) if x.dtype.itemsize == 2 else rows[0].copy()
        with np.errstate(all="ignore"):
            for row in rows[1:]:
                total = _FOLDS[op](total, row.astype(total.dtype))
        return total.astype(x.dtype)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Queue an all-reduce."""
        x, y = _array(sendbuf, count, datatype), _array(recvbuf, count, datatype)
        self._queue("allReduce", count, datatype, stream, lambda: np.copyto(y, self._folded(x, op)))

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """Queue a reduction to one rank."""
        x = _array(sendbuf, count, datatype)
        y = _array(recvbuf, count, datatype) if self._rank == root else None

        def work() -> None:
            total = self._folded(x, op)
            if y is not None:
                y[...] = total

        self._queue("reduce", count, datatype, stream, work)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Queue a broadcast."""
        x, y = _array(sendbuff, count, datatype), _array(recvbuff, count, datatype)
        self._queue("broadcast", count, datatype, stream, lambda: np.copyto(y, self._rows(x)[root]))

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """Queue an all-gather."""
        x, y = _array(sendbuf, count, datatype), _array(recvbuf, count * self._size, datatype)
        self._queue("allGather", count, datatype, stream, lambda: np.copyto(y, self._rows(x).reshape(-1)))

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        """Queue a reduce-scatter."""
        x, y = _array(sendbuf, recvcount * self._size, datatype), _array(recvbuf, recvcount, datatype)
        first = self._rank * recvcount
        self._queue(
            "reduceScatter",
            recvcount,
            datatype,
            stream,
            lambda: np.copyto(y, self._folded(x, op)[first : first + recvcount]),
        )

    def destroy(self) -> None:
        """Free it."""
        DESTROYED.append(self._size)
        self._comm.Free()

    def abort(self) -> None:
        """Give it up on this rank alone."""
        ABORTED.append(self._size)

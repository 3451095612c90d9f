"""Who can do an operation: mpiddp, the MPI library called by plain mpi4py, and one copy of the same bytes.

A contender turns the arrays of an operation into a call without arguments, so that what is timed is what a program
would write. `prepare` returns None where the contender cannot do it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

import mpiddp.distributed as dist
from mpiddp.algorithms import plan
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.reduction import mpi_op

from .buffers import ROOTED, Buffers

Call = Callable[[], object]


class Contender(Protocol):
    """Something that does the operations."""

    name: str

    def prepare(self, b: Buffers) -> Call | None:
        """Return what does the operation once on these arrays."""

    def algorithm(self, b: Buffers) -> str:
        """Return the name of what runs, as far as it is known."""


def reduce_op(name: str) -> dist.ReduceOp:
    """Return the reduction that the command line calls ``name``."""
    op: dist.ReduceOp = getattr(dist.ReduceOp, name.upper())
    return op


@contextlib.contextmanager
def choosing(operation: str, algorithm: str) -> Iterator[None]:
    """Let mpiddp use one algorithm for an operation; "auto" leaves the choice to it.

    Raises
    ------
    ValueError
        If the operation has no such algorithm.
    """
    if algorithm == "auto":
        yield
        return
    before = os.environ.get("MPIDDP_ALGORITHM")
    os.environ["MPIDDP_ALGORITHM"] = f"{operation}:{algorithm}"
    try:
        plan.forget()
        yield
    finally:
        del os.environ["MPIDDP_ALGORITHM"]
        if before is not None:
            os.environ["MPIDDP_ALGORITHM"] = before
        plan.forget()


class Mpiddp:
    """mpiddp itself, in its blocking form."""

    def __init__(self, name: str = "mpiddp") -> None:
        self.name = name

    def algorithm(self, b: Buffers) -> str:
        """Ask the table that chooses."""
        if b.operation not in plan.ONE_NODE:
            return "native"
        link = dist.groups.default_group().link
        name = plan.algorithm_of(b.operation, link, b.total_bytes)
        if name == "native" and b.op and mpi_op(b.dtype, reduce_op(b.op)) is None:
            return "exchange"
        return name

    def prepare(self, b: Buffers) -> Call:
        """Return what does the operation once on these arrays."""
        x, output, op, root = b.x, b.output, reduce_op(b.op), b.root
        parts = b.blocks(x if b.operation == "scatter" else output) if b.rank == root else None
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(x, op),
            "broadcast": lambda: dist.broadcast(x, root),
            "reduce": lambda: dist.reduce(x, root, op),
            "all_gather": lambda: dist.all_gather_single(output, x),
            "reduce_scatter": lambda: dist.reduce_scatter_single(output, x, op),
            "gather": lambda: dist.gather(x, parts, root),
            "scatter": lambda: dist.scatter(output, parts, root),
            "all_to_all": lambda: dist.all_to_all_single(output, x),
            "send_recv": lambda: _around(b),
            "barrier": dist.barrier,
        }
        return calls[b.operation]


def _around(b: Buffers) -> None:
    """Send to the next rank and receive from the one before."""
    received = dist.irecv(b.output, (b.rank - 1) % b.size)
    sent = dist.isend(b.x, (b.rank + 1) % b.size)
    assert received is not None and sent is not None
    received.wait()
    sent.wait()


class Mpi4py:
    """The MPI library's blocking calls, by mpi4py, as a program without mpiddp would write them.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator of its own.
    """

    name = "mpi4py"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def algorithm(self, b: Buffers) -> str:
        """Return nothing: the library does not tell."""
        return ""

    def prepare(self, b: Buffers) -> Call | None:
        """Return what does the operation once on these arrays, where MPI defines it."""
        comm, x, output, root = self._comm, b.x, b.output, b.root
        op = mpi_op(b.dtype, reduce_op(b.op))
        if op is None or b.dtype.kind not in "biufc":
            return None
        share = b.dtype.type(1 / b.size) if b.op == "avg" else None

        def reduce_with(call: Call) -> Call:
            """Divide what was summed, for an average."""
            return call if share is None else lambda: (call(), np.multiply(output, share, out=output))

        here = b.rank == root
        calls: dict[str, Call] = {
            "all_reduce": reduce_with(lambda: comm.Allreduce(MPI.IN_PLACE, x, op)),
            "broadcast": lambda: comm.Bcast(x, root),
            "reduce": lambda: comm.Reduce(MPI.IN_PLACE if here else x, x if here else None, op, root),
            "all_gather": lambda: comm.Allgather(x, output),
            "reduce_scatter": reduce_with(lambda: comm.Reduce_scatter_block(x, output, op)),
            "gather": lambda: comm.Gather(x, output if here else None, root),
            "scatter": lambda: comm.Scatter(x if here else None, output, root),
            "all_to_all": lambda: comm.Alltoall(x, output),
            "send_recv": lambda: comm.Sendrecv(x, (b.rank + 1) % b.size, recvbuf=output, source=(b.rank - 1) % b.size),
            "barrier": comm.Barrier,
        }
        if b.operation == "reduce" and here:
            return reduce_with(calls["reduce"])
        return calls[b.operation]


class Memcpy:
    """One copy of S bytes from an array to another, by all ranks at once, until the last one has done it.

    What memory can do. The barrier at its end counts: where ranks share cores, they copy one after the other.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator of its own.
    """

    name = "memcpy"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def algorithm(self, b: Buffers) -> str:
        """Return nothing."""
        return ""

    def prepare(self, b: Buffers) -> Call | None:
        """Return the copy; None for an operation without arrays."""
        if not b.total_bytes:
            return None
        source, target = np.zeros(b.total_bytes, np.uint8), np.ones(b.total_bytes, np.uint8)

        def copy() -> None:
            np.copyto(target, source)
            self._comm.Barrier()

        return copy


def root_of(operation: str) -> int:
    """Return the root that tables print: 0, or -1 for an operation that has none."""
    return 0 if operation in ROOTED else -1

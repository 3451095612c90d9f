"""The contenders of ``bench compare``: how mpiddp, mpi4py and torch do each operation.

A new row of the benchmark is a line in each of the two tables, and its arrays in `Buffers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import mpiddp.distributed as dist
from mpiddp.algorithms import fallback, plan
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.reduction import mpi_op
from mpiddp.shm.eager import EagerBuffers

from .operations import MESSAGES, REDUCING, Buffers, reduce_op
from .timing import Call


class Contender(NamedTuple):
    name: str
    prepare: Callable[[Buffers], Call | None]
    """Returns the call of the buffers' operation; None if the library has no such operation."""
    algorithm: str | None = None
    """mpiddp's, if it is not to choose."""


def to_and_fro(b: Buffers, send: Call, receive: Call) -> None:
    """Send to the partner and back; a rank without one copies."""
    if b.partner == b.rank:
        np.copyto(b.output, b.x)
        return
    for call in (send, receive) if b.rank < b.partner else (receive, send):
        call()


def mpiddp(b: Buffers, algorithm: str | None = None) -> Call:
    """Return the call, by the built-in choice or by an algorithm; ValueError if the operation has none of its name."""
    chooses = b.operation in plan.ONE_NODE
    if algorithm is not None and not chooses:
        raise ValueError(f"there is no algorithm {b.operation}:{algorithm}")
    return torch(b, dist, None, lambda x: x, **({"algorithm": algorithm} if chooses else {}))


def mpi4py(b: Buffers, comm: MPI.Intracomm) -> Call | None:
    x, output, root, here = b.x, b.output, b.root, b.rank == b.root
    op = mpi_op(b.dtype, reduce_op("sum" if b.op == "exact_sum" else b.op))  # MPI has no exact one
    if op is None or b.dtype.kind not in "biufc":
        return None

    def around() -> None:
        MPI.Request.Waitall([comm.Irecv(output, b.left), comm.Isend(x, b.right)])

    table: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, x, op),
        "broadcast": lambda: comm.Bcast(x, root),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if here else x, x if here else None, op, root),
        "all_gather": lambda: comm.Allgather(x, output),
        "all_gather_list": lambda: comm.Allgather(x, output),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, output, op),
        "gather": lambda: comm.Gather(x, output if here else None, root),
        "scatter": lambda: comm.Scatter(x if here else None, output, root),
        "all_to_all": lambda: comm.Alltoall(x, output),
        "all_to_all_list": lambda: comm.Alltoall(x, output),
        "send_recv": around,
        "batch_isend_irecv": around,
        "ping_pong": lambda: to_and_fro(b, lambda: comm.Send(x, b.partner), lambda: comm.Recv(output, b.partner)),
        "all_reduce_async": lambda: comm.Iallreduce(MPI.IN_PLACE, x, op).Wait(),
        "barrier": comm.Barrier,
    }
    call = table[b.operation]
    if b.op != "avg" or b.operation not in REDUCING or (b.operation == "reduce" and not here):
        return call
    share = b.dtype.type(1 / b.size)
    return lambda: (call(), np.multiply(output, share, out=output))  # MPI has no average


def torch(b: Buffers, td: Any, group: Any, tensor: Callable[[Any], Any], **how: Any) -> Call:
    """Return the call of ``td``, which is ``torch.distributed``, or mpiddp with the same names.

    ``tensor`` makes a tensor over an array's memory; ``how`` has arguments that only mpiddp takes.
    """
    x, output, root, op = tensor(b.x), tensor(b.output), b.root, getattr(td.ReduceOp, b.op.upper())
    inputs, outputs = [[tensor(block) for block in b.blocks(each)] for each in (b.x, b.output)]
    parts = (inputs if b.operation == "scatter" else outputs) if b.rank == root else None
    # torch 2.13 has new names, and warns of the older ones.
    gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)
    reduce_scatter = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)

    def around() -> None:
        for each in (td.irecv(output, b.left, group), td.isend(x, b.right, group)):
            each.wait()

    def batch() -> None:
        ops = [td.P2POp(td.irecv, output, b.left, group), td.P2POp(td.isend, x, b.right, group)]
        for each in td.batch_isend_irecv(ops):
            each.wait()

    table: dict[str, Call] = {
        "all_reduce": lambda: td.all_reduce(x, op, group, **how),
        "broadcast": lambda: td.broadcast(x, root, group, **how),
        "reduce": lambda: td.reduce(x, root, op, group, **how),
        "all_gather": lambda: gather(output, x, group, **how),
        "all_gather_list": lambda: td.all_gather(outputs, x, group),
        "reduce_scatter": lambda: reduce_scatter(output, x, op, group, **how),
        "gather": lambda: td.gather(x, parts, root, group),
        "scatter": lambda: td.scatter(output, parts, root, group),
        "all_to_all": lambda: td.all_to_all_single(output, x, group=group),
        "all_to_all_list": lambda: td.all_to_all(outputs, inputs, group),
        "send_recv": around,
        "batch_isend_irecv": batch,
        "ping_pong": lambda: to_and_fro(
            b, lambda: td.send(x, b.partner, group), lambda: td.recv(output, b.partner, group)
        ),
        "all_reduce_async": lambda: td.all_reduce(x, op, group, async_op=True).wait(),
        "barrier": lambda: td.barrier(group),
    }
    return table[b.operation]


def memcpy(b: Buffers, comm: MPI.Intracomm) -> Call | None:
    """Make one copy of S bytes by all ranks at once: the bound of memory.

    The barrier at its end counts: ranks that share a core copy one after the other.
    """
    if not b.total_bytes:
        return None
    source = max(b.x, b.output, key=lambda array: array.nbytes)
    target = np.ones_like(source)

    def copy() -> None:
        np.copyto(target, source)
        comm.Barrier()

    return copy


def algorithm_of(b: Buffers, algorithm: str | None = None) -> str:
    link = dist.groups.default_group()._link
    if b.operation not in plan.ONE_NODE:
        if b.operation == "all_reduce_async":
            return plan.algorithm_of("all_reduce", link, b.total_bytes)
        through_buffers = b.operation not in MESSAGES and link.find(EagerBuffers) is not None
        return "blocks" if through_buffers else "native"
    name = plan.algorithm_of(b.operation, link, b.total_bytes, algorithm)
    if name == "native" and b.operation in REDUCING:
        module = fallback.choose(b.operation, link, b.dtype, reduce_op(b.op), b.total_bytes)
        return module.__name__.rpartition(".")[2]
    return name

"""The measured operations: their arrays, the calls of mpiddp, mpi4py and torch, and a check of the results.

Sizes are those of nccl-tests. The size S of an operation on n ranks is the number of bytes that one rank sends or
receives. If an array has a block for each rank, S is the size of the whole array, and a block has S / n bytes.

Measured calls have zeros as inputs. Before the call whose result is checked, inputs are filled with a short pattern of
small integers, again and again. Every rank can compute the patterns of all ranks, and so knows the right results.

A new operation needs its name in `OPERATIONS` of `cli`, a line in each of the tables in `mpi4py` and `torch`, and its
arrays in `Buffers`.

References
----------
https://github.com/NVIDIA/nccl-tests: doc/PERFORMANCE.md, and the functions ``GetBw`` for gather, scatter and send/recv.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import mpiddp.distributed as dist
from mpiddp.algorithms import fallback, plan
from mpiddp.device import download, placed
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.reduction import check, mpi_op
from mpiddp.shm.eager import EagerBuffers
from mpiddp.training.options import refusing
from mpiddp.typing import Array

from .timing import Call

Allocate = Callable[[int, np.dtype[Any]], Any]
"""A function that makes a flat array of a length and dtype. All ranks call it in the same order."""

REDUCING = ("all_reduce", "all_reduce_async", "reduce", "reduce_scatter")
MESSAGES = ("send_recv", "batch_isend_irecv", "ping_pong", "barrier")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ONE_ARRAY = ("all_reduce", "all_reduce_async", "broadcast", "reduce")
_BLOCKS_IN = ("reduce_scatter", "scatter", "all_to_all", "all_to_all_list")
"""Operations whose input has a block for each rank. The result of rank r comes from the blocks r of the inputs."""
_BLOCKS_OUT = ("all_gather", "gather", "all_to_all", "all_gather_list", "all_to_all_list")
"""Operations whose output has a block from each rank."""
_BLOCKS = {*_BLOCKS_IN, *_BLOCKS_OUT}

_SOURCE = {
    "broadcast": "root",
    "scatter": "root",
    "send_recv": "left",
    "batch_isend_irecv": "left",
    "ping_pong": "partner",
}
"""For operations that move one rank's pattern: the attribute of `Buffers` that is the sending rank."""

PERIOD = 1021
"""Length of the pattern of values. It is a prime, so that blocks begin at different positions of the pattern."""
_SEED = 20_05
_CHUNK = PERIOD * 64


def bus_factor(operation: str, size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, S / time, for ``size`` ranks.

    The ratio is the number of bytes that the busiest link has to carry, divided by S.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if operation.startswith("all_reduce"):
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in _BLOCKS else 1.0


class Buffers:
    """The arrays of an operation on this rank.

    The operations all_gather, reduce_scatter and all_to_all take one array for all blocks; those with ``_list`` take a
    list of arrays. ``size_bytes`` is rounded down so that all blocks have equally many whole elements, at least one.
    Only a barrier has none.
    """

    def __init__(
        self,
        operation: str,
        rank: int,
        size: int,
        size_bytes: int,
        dtype: np.dtype[Any],
        op: str = "sum",
        allocate: Allocate = np.empty,
    ) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        self.dtype, self.op = dtype, op
        self.root, self.left, self.right = 0, (rank - 1) % size, (rank + 1) % size
        self.partner = rank ^ 1 if rank ^ 1 < size else rank
        """The other rank of a ping-pong. The last rank of an odd number has none: ``partner`` is the rank itself."""
        blocks = size if operation in _BLOCKS else 1
        self.count = 0 if operation == "barrier" else max(size_bytes // blocks // dtype.itemsize, 1)
        """Elements of a block, or of the array if it has no blocks, as in nccl-tests."""
        self.total_bytes = self.count * blocks * dtype.itemsize
        """The size S of the operation, under which its results are listed."""
        inputs, outputs = (size if operation in table else 1 for table in (_BLOCKS_IN, _BLOCKS_OUT))
        self.x: Array = allocate(self.count * inputs, dtype)
        self.output: Array = self.x if operation in _ONE_ARRAY else allocate(self.count * outputs, dtype)

    def blocks(self, x: Array) -> list[Array]:
        return [x[rank * self.count : (rank + 1) * self.count] for rank in range(self.size)]

    def reset(self) -> None:
        """Fill input and output with zeros before a measured call.

        Repeated reductions leave zeros unchanged, so no call meets overflow or slow subnormal numbers.
        """
        self.x[...] = 0
        self.output[...] = 0

    def fill(self) -> None:
        """Fill the input with this rank's pattern, and the output, unless it is the same array, with a wrong value."""
        if self.operation not in _ONE_ARRAY:
            self.output[...] = 101
        block = placed(_tile(pattern(self.rank, self.dtype), 0, min(_CHUNK, self.x.size)), self.x)
        for start in range(0, self.x.size, _CHUNK):
            part = self.x[start : start + _CHUNK]
            part[...] = block[: part.size]

    def count_wrong(self, *, spoils_inputs: bool = False) -> int:
        """Count the wrong elements of the result, after `fill` and a call.

        ``spoils_inputs`` is for Gloo, whose reduce overwrites the arrays of ranks that get no result: those are not
        checked.
        """
        on_root = self.rank == self.root
        if not on_root and (self.operation == "gather" or (self.operation == "reduce" and spoils_inputs)):
            return 0
        first = self.rank * self.count if self.operation in _BLOCKS_IN else 0
        if self.operation in REDUCING and (on_root or self.operation != "reduce"):
            return count_mismatches(self.output, reduced(self.size, self.dtype, self.op), first)
        if self.operation in _BLOCKS_OUT:
            blocks = enumerate(self.blocks(self.output))
            return sum(count_mismatches(block, pattern(rank, self.dtype), first) for rank, block in blocks)
        source: int = getattr(self, _SOURCE.get(self.operation, "rank"))
        return count_mismatches(self.output, pattern(source, self.dtype), first)


@functools.cache
def pattern(rank: int, dtype: np.dtype[Any]) -> Array:
    """Return the pattern of a rank: `PERIOD` random integers from -3 to 3, or from 0 if the dtype is unsigned.

    The integers are so small that floats hold their sums over some hundred ranks exactly. Sums of short integers may
    wrap, and `reduced` lets them wrap, too.
    """
    rng = np.random.default_rng((_SEED, rank))
    lowest = 0 if dtype.kind == "u" else -3
    return rng.integers(lowest, 4, PERIOD).astype(dtype)


def reduced(size: int, dtype: np.dtype[Any], op: str) -> Array:
    wide: Array = np.stack([pattern(rank, dtype) for rank in range(size)]).astype(_wide(dtype))
    found: Array = getattr(np, reduce_op(op)._combining).reduce(wide, axis=0)
    found = found / size if op == "avg" else found
    return found.astype(dtype).astype(wide.dtype) if dtype.kind in "biu" else found  # sums of integers wrap


def _wide(dtype: np.dtype[Any]) -> type:
    return {"c": np.complex128, **dict.fromkeys("biu", np.int64)}.get(dtype.kind, np.float64)


def _tile(values: Array, first: int, count: int) -> Array:
    return np.resize(np.roll(values, -first), count)


def count_mismatches(x: Array, values: Array, first: int = 0) -> int:
    """Count the elements of ``x`` that differ from a repeated pattern whose position ``first`` is at ``x[0]``.

    The tolerance is the dtype's distance from 1 to the next number, times the value's magnitude plus 1. It allows for
    the rounding of an average, and is far smaller than the error of a missing contribution.
    """
    x = download(x)
    block = _tile(values.astype(_wide(x.dtype)), first % PERIOD, min(_CHUNK, x.size))
    tolerance = _unit(x.dtype) * (np.abs(block) + 1)
    wrong = 0
    for start in range(0, x.size, _CHUNK):
        part = x[start : start + _CHUNK]
        # NaN counts as wrong, because comparisons with NaN are false.
        close = np.abs(part.astype(block.dtype) - block[: part.size]) <= tolerance[: part.size]
        wrong += part.size - int(np.count_nonzero(close))
    return wrong


def _unit(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next larger number; 0 for integers."""
    if dtype.kind in "biu":
        return 0.0
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def reduce_op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name.upper())  # type: ignore[no-any-return]


def check_reduction(operation: str, op: str, dtype: np.dtype[Any]) -> None:
    if operation in REDUCING:
        with refusing(f"--op {op} --dtype {dtype.name}: ", TypeError):
            check(dtype, reduce_op(op))


class Contender(NamedTuple):
    name: str
    prepare: Callable[[Buffers], Call | None]
    """Function that returns the call of an operation on its buffers; None if the library has no such operation."""
    algorithm: str | None = None
    """The algorithm that mpiddp is told to use; None if mpiddp chooses."""
    symmetric: bool = False
    """True if the arrays lie in symmetric memory, which the ranks of a node share."""


def to_and_fro(b: Buffers, send: Call, receive: Call) -> None:
    """Send an array to the partner and receive one back. A rank without a partner copies the array instead."""
    if b.partner == b.rank:
        np.copyto(b.output, b.x)
        return
    for call in (send, receive) if b.rank < b.partner else (receive, send):
        call()


def mpiddp(b: Buffers, algorithm: str | None = None) -> Call:
    """Return mpiddp's call of the operation, with the given algorithm or with mpiddp's own choice.

    ValueError if an algorithm is given, but the operation has no algorithms to choose from.
    """
    chooses = b.operation in plan.ONE_NODE
    if algorithm is not None and not chooses:
        raise ValueError(f"there is no algorithm {b.operation}:{algorithm}")
    return torch(b, dist, None, lambda x: x, **({"algorithm": algorithm} if chooses else {}))


def mpi4py(b: Buffers, comm: MPI.Intracomm) -> Call | None:
    x, output, root, here = b.x, b.output, b.root, b.rank == b.root
    op = mpi_op(b.dtype, reduce_op("sum" if b.op == "exact_sum" else b.op))  # MPI has no EXACT_SUM
    if op is None or b.dtype.kind not in "biufc":
        return None

    def around() -> None:
        MPI.Request.Waitall([comm.Irecv(output, b.left), comm.Isend(x, b.right)])

    table: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, x, op),
        "broadcast": lambda: comm.Bcast(x, root),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if here else x, x if here else None, op, root),
        "all_gather": lambda: comm.Allgather(x, output),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, output, op),
        "gather": lambda: comm.Gather(x, output if here else None, root),
        "scatter": lambda: comm.Scatter(x if here else None, output, root),
        "all_to_all": lambda: comm.Alltoall(x, output),
        "send_recv": around,
        "batch_isend_irecv": around,
        "ping_pong": lambda: to_and_fro(b, lambda: comm.Send(x, b.partner), lambda: comm.Recv(output, b.partner)),
        "all_reduce_async": lambda: comm.Iallreduce(MPI.IN_PLACE, x, op).Wait(),
        "barrier": comm.Barrier,
    }
    call = table[b.operation.removesuffix("_list")]
    if b.op != "avg" or b.operation not in REDUCING or (b.operation == "reduce" and not here):
        return call
    share = b.dtype.type(1 / b.size)
    return lambda: (call(), np.multiply(output, share, out=output))  # MPI has no average, so the sum is scaled


def torch(b: Buffers, td: Any, group: Any, tensor: Callable[[Any], Any], **how: Any) -> Call:
    """Return the call of the operation in ``td``, which is ``torch.distributed`` or `mpiddp.distributed`.

    ``tensor`` makes a tensor over an array's memory. ``how`` holds keyword arguments that only mpiddp takes.
    """
    x, output, root, op = tensor(b.x), tensor(b.output), b.root, getattr(td.ReduceOp, b.op.upper())
    inputs, outputs = [[tensor(block) for block in b.blocks(each)] for each in (b.x, b.output)]
    parts = (inputs if b.operation == "scatter" else outputs) if b.rank == root else None
    # torch 2.13 renamed these two functions, and warns if the old names are used.
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
    """Return a call in which all ranks copy S bytes at the same time; None if the operation has no bytes.

    Its time shows the memory's bandwidth, with which the times of operations can be compared. It includes the barrier
    at the end, because ranks that share a core copy one after the other.
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

"""The MPI library's own collectives (MPI 4.1, chapter 6).

Gather, scatter and the all-to-alls go by messages instead. So blocks may differ in size between ranks, and a block of
the wrong size raises an error.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpiddp.faults.calls import BlockError
from mpiddp.mpi import message
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Channel
from mpiddp.mpi.message import as_bytes, as_message, chunks, countable, counted, movable, size_of, spans_of
from mpiddp.mpi.reduction import ReduceOp, mpi_op
from mpiddp.mpi.requests import READY, All, Awaited, Steps
from mpiddp.mpi.work import meet
from mpiddp.typing import Array

from .local_reduce import finish, premultiplied, premultiply
from .tags import Tag


def barrier(link: Channel) -> Steps:
    yield link.now.Ibarrier()


def _defined(x: Array, op: ReduceOp) -> MPI.Op:
    found = mpi_op(x.dtype, op)
    assert found is not None, "`fallback` takes the others, and the table of devices does"
    return found


def _all(requests: list[MPI.Request]) -> MPI.Request | All:
    return requests[0] if len(requests) == 1 else All(requests)


def broadcast(link: Channel, x: Array, root: int) -> Steps:
    yield _all([link.now.Ibcast(counted(piece), root) for piece in chunks(movable(x))])


def all_reduce(link: Channel, x: Array, op: ReduceOp) -> Steps:
    premultiply(op, x)
    yield _all([link.now.Iallreduce(MPI.IN_PLACE, counted(piece), _defined(x, op)) for piece in chunks(x)])
    finish(op, x, link.size)


def reduce(link: Channel, x: Array, root: int, op: ReduceOp) -> Steps:
    reduction = _defined(x, op)
    if link.rank == root:
        premultiply(op, x)
        yield _all([link.now.Ireduce(MPI.IN_PLACE, piece, reduction, root) for piece in chunks(x)])
        finish(op, x, link.size)
    else:
        sent = premultiplied(op, x)  # the variable keeps the array alive; mpi4py's request for a reduction does not
        yield _all([link.now.Ireduce(piece, None, reduction, root) for piece in chunks(sent)])


def reduce_scatter(link: Channel, output: Array, x: Array, op: ReduceOp) -> Steps:
    if np.may_share_memory(output, x):  # MPI forbids an output that is this rank's block
        result = np.empty_like(output)
        yield from reduce_scatter(link, result, x, op)
        output[...] = result
        return
    x = premultiplied(op, x)
    if countable(x):
        yield link.now.Ireduce_scatter_block(x, output, _defined(x, op))
    else:
        yield All(reduce_blocks(link.now, output, x, op))
    finish(op, output, link.size)


def reduce_blocks(comm: MPI.Intracomm, output: Array, x: Array, op: ReduceOp) -> list[MPI.Request]:
    """Reduce block r of ``x`` into rank r's ``output``, by one reduction for each block."""
    requests, reduction = [], _defined(x, op)
    for root, block in enumerate(x.reshape(comm.size, -1)):
        pieces = chunks(block)
        results = chunks(output.reshape(-1)) if root == comm.rank else [None] * len(pieces)
        requests += [comm.Ireduce(*pair, reduction, root) for pair in zip(pieces, results, strict=True)]
    return requests


def all_gather(link: Channel, output: Array, x: Array) -> Steps:
    if np.may_share_memory(output, x):
        x = x.copy()
    if countable(movable(output)):
        yield link.now.Iallgather(movable(x), movable(output))
    else:
        yield from all_gather_list(link, list(output.reshape(link.size, *x.shape)), x)


def all_gather_list(link: Channel, outputs: Sequence[Array], x: Array) -> Steps:
    sizes = [output.nbytes for output in outputs]
    if sum(sizes) > message.MAX_COUNT:
        outputs[link.rank][...] = x
        yield All(
            [link.now.Ibcast(piece, root) for root, each in enumerate(outputs) for piece in chunks(as_bytes(each))]
        )
        return
    memory = np.empty(sum(sizes), np.uint8)
    yield link.now.Iallgatherv(as_bytes(x), (memory, sizes, None, MPI.BYTE))
    start = 0
    for output in outputs:
        as_bytes(output)[...] = memory[start : start + output.nbytes]
        start += output.nbytes


def _exchange(
    link: Channel, operation: str, outputs: Iterable[tuple[int, Array]], inputs: Iterable[tuple[int, Array]]
) -> Steps:
    """Send inputs to ranks and receive outputs from ranks, without packing.

    All ranks submit operations in one order, so a rank's messages to another one arrive in that order.
    """
    sends, receives, blocks, fault = [], [], dict(outputs), ""
    for rank, x in inputs:
        if rank != link.rank:
            sends.append(link.now.Isend(as_message(x, x.nbytes), rank, Tag.BLOCK))
        else:
            as_bytes(blocks.pop(rank))[...] = as_bytes(x)
    yield READY  # the steps go on at the head of the queue, because early blocks are for the operation there
    early, probe = link.early.setdefault(link.now.handle, {}), _Probe(link.now)
    while blocks:  # a block is received once its size is known, because MPI may crash in a receive that is too short
        known = blocks.keys() & early.keys() if early else None
        if known:
            source = known.pop()
            message, sent_bytes = early[source].popleft()
            if not early[source]:
                del early[source]
        else:
            yield probe
            message, source, sent_bytes = probe.message, probe.status.Get_source(), size_of(probe.status)
            if source not in blocks:  # the block is for a later operation, in which its sender is already
                early.setdefault(source, deque()).append((message, sent_bytes))
                continue
        x = blocks.pop(source)
        if sent_bytes != x.nbytes:  # the block is received nevertheless, so that the next one is the right one
            fault = fault or wrong_size(link, operation, source, sent_bytes, x.nbytes)
            x = np.empty(sent_bytes, np.uint8)
        receives.append(message.Irecv(as_message(x, sent_bytes)))
    yield All(receives + sends)
    if fault:
        raise BlockError(fault)


def _apart(inputs: Sequence[Array], outputs: Sequence[Array], rank: int) -> Sequence[Array]:
    sent = [*inputs[:rank], *inputs[rank + 1 :]]
    if all(x.base is None for x in (*outputs, *sent)):  # each array has memory of its own
        shared = not {*map(id, outputs)}.isdisjoint(map(id, sent))
    else:
        shared = overlap(outputs, sent)
    return [x.copy() for x in inputs] if shared else inputs


def overlap(outputs: Sequence[Array], inputs: Sequence[Array]) -> bool:
    written, sent = ([x for x in xs if isinstance(x, np.ndarray) and x.size] for xs in (outputs, inputs))
    return meet([*spans_of(written)], [*spans_of(sent)])


class _Probe(Awaited):
    """The event that the next block has come, from any sender.

    With a probe for each sender, MPI would search all unexpected messages once for each sender.
    """

    message: Any = None

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self.status = comm, MPI.Status()

    def Test(self) -> bool:  # noqa: N802
        self.message = self._comm.Improbe(MPI.ANY_SOURCE, Tag.BLOCK, self.status)
        return self.message is not None


def wrong_size(link: Channel, operation: str, source: int, sent_bytes: int, expected_bytes: int) -> str:
    sender, receiver = link.ranks[source], link.ranks[link.rank]
    return (
        f"{operation}: rank {sender} sends {sent_bytes} bytes to rank {receiver}, which expects {expected_bytes} from"
        " it: what one rank sends must have the shape of what the other one has for it"
    )


def gather(link: Channel, outputs: Sequence[Array] | None, x: Array, root: int) -> Steps:
    return _exchange(link, "gather", enumerate(outputs or ()), [(root, x)])


def scatter(link: Channel, x: Array, inputs: Sequence[Array] | None, root: int) -> Steps:
    return _exchange(link, "scatter", [(root, x)], enumerate(_apart(inputs, [x], root) if inputs else ()))


def all_to_all(link: Channel, outputs: Sequence[Array], inputs: Sequence[Array]) -> Steps:
    return _exchange(link, "all_to_all", enumerate(outputs), enumerate(_apart(inputs, outputs, link.rank)))


def all_to_all_single(
    link: Channel, output: Array, x: Array, output_counts: Sequence[int], input_counts: Sequence[int]
) -> Steps:
    if np.may_share_memory(output, x):
        x = x.copy()
    blocks = enumerate(cut(output, output_counts)), enumerate(cut(x, input_counts))
    return _exchange(link, "all_to_all_single", *blocks)


def cut(x: Array, counts: Sequence[int]) -> list[Array]:
    """Cut the array into blocks, whose sizes in bytes ``counts`` tells."""
    ends = itertools.accumulate(counts)
    return [as_bytes(x)[end - count : end] for end, count in zip(ends, counts, strict=True)]

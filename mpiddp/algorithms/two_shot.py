"""Two shots in a node's memory: every rank reduces its slice over all ranks' arrays and writes the result to all.

In the handshake the ranks tell each other where their arrays lie, which decides what follows:

- Symmetric arrays are reduced without a copy, in about the time that one copy would take.
- Other arrays go the way that was the fastest on this machine (see `ways`). One way is cross-memory attach, by which a
  rank reads its slice of the others' arrays piece by piece into its cache, and writes the result to them. The other one
  passes chunks through a scratch. For two ranks this is done in one shot, in which every rank reduces everything. That
  saves a barrier; in two, more ranks read less.

The barriers are MPI's, because a rank that polls a flag in memory would not see that another has failed. The two shots
are those of PyTorch's symmetric memory and NVIDIA's TensorRT-LLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np

from mpiddp.faults.calls import NO_ROOT
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.shm.scratch import Scratch
from mpiddp.shm.segment import Location, address_of, find
from mpiddp.typing import Array

from . import fallback, handshake, native
from .handshake import Entries
from .local_reduce import bounds, reduce_rows
from .peer_access import Copies, PeerAccess, Views, copied
from .ways import ATTACH, MPIS, SCRATCH, Kind, Ways

CHUNK_BYTES = 1 << 19
"""The bytes that a pipeline moves at once: a part of the array and its copy stay in a core's cache."""
MPIS_BYTES = 1 << 21
"""Below, the handshake takes what MPI's own operation might save."""
_BEGUN = Location(-1, 0)
_BLOCKING = -2
"""In place of an ordinary array's segment: its rank blocks in the call."""

Step: TypeAlias = Callable[[int, int, list[Array]], None]
"""A function of the start and stop of a chunk in the array, and of all ranks' buffers."""
Take: TypeAlias = Callable[[int, int, list[Array], list[float] | None], None]
"""A `Step` that also gets the ranks' factors of ``PREMUL_SUM``, which are known once they have met."""


class Pipeline:
    """Moves an array through the scratch chunk by chunk: put, barrier, take.

    ``put`` writes a chunk to this rank's buffer. ``take`` reads all ranks' buffers after a barrier, and may write to
    this rank's. ``collect``, if given, reads after another barrier what the others' ``take`` has written. A chunk
    consists of ``rows`` pieces side by side; ``length`` is the number of elements of a row in all chunks together.

    One chunk is written while another is read. The first is put before the ranks meet, if that is possible, so that
    short arrays need a single barrier.
    """

    def __init__(
        self,
        link: Link,
        like: Array,
        length: int,
        put: Step,
        take: Take,
        collect: Step | None = None,
        *,
        rows: int = 1,
    ) -> None:
        self._link, self._scratch = link, link.resource(Scratch)
        self._dtype, self._length, self._rows = like.dtype, length, rows
        self._put, self._take, self._collect = put, take, collect
        self.factors: list[float] | None = None
        """For ``take``, which must not look here: it would keep its arrays alive in a circle."""
        self._step = max(min(CHUNK_BYTES, self._scratch.buffer_bytes) // like.itemsize // rows, 1)

    def begin(self) -> bool:
        """Put the first chunk; return False if that is not possible yet.

        It is not before the memory is there, and not while this rank has unfinished operations: all ranks count rounds
        in the order of operations.
        """
        stop = min(self._step, self._length)
        if not self._scratch.ready or len(self._link.queue):
            return False
        self._put(0, stop, self._scratch.next_buffers(self._rows * stop, self._dtype))
        return True

    def run(self, begun: bool) -> Steps:
        """Run all chunks. ``begun`` says that all ranks have put the first one before they met."""
        before: tuple[int, int, list[Array]] | None = None
        for start in range(0, self._length, self._step):
            stop = min(start + self._step, self._length)
            chunk = (start, stop, self._scratch.begin_round(self._rows * (stop - start), self._dtype))
            if start or not begun:
                self._put(*chunk)
                yield self._link.later.Ibarrier()
            if before is not None and self._collect is not None:
                self._collect(*before)
            self._take(*chunk, self.factors)
            before = chunk
        if before is not None and self._collect is not None:
            self._scratch.begin_round(0, self._dtype)
            yield self._link.later.Ibarrier()
            self._collect(*before)


Move: TypeAlias = Callable[[PeerAccess, list[float] | None], None]
"""Does this rank's part of the operation where the arrays lie, with the factors of ``PREMUL_SUM``."""


def _meet(
    link: Link,
    call: Call,
    x: Array,
    build: Callable[[], Pipeline],
    move: Move,
    messages: Callable[[Link], Steps],
    way: str | None,
    op: ReduceOp | None = None,
) -> Steps:
    """Meet all ranks, of which ``x`` is this one's array, and do the operation.

    Ordinary arrays go by ``way`` if that is possible, and by default as `ways` says. ``messages`` makes the steps of
    the operation without shared memory. They are MPI's own, and a way besides, where no sum's bits depend on them.
    """
    ways = link.resource(Ways)
    kind = kind_of(call, x)
    pipeline = None
    place = find(x)
    if not place.segment:
        place = Location(_BLOCKING if link.busy else 0, address_of(x))
        if (way or (ways.chosen(kind) if link.busy else SCRATCH)) == SCRATCH:
            pipeline = build()
            if pipeline.begin():
                place = _BEGUN
    entries: Entries = yield from handshake.exchange(link, call, place, op)
    factors = None if op is None else entries.factors_of(op)
    rows = entries.views(link, x)
    if rows is not None:
        yield from _moved(link, move, Views(rows, link.rank), factors)
        return
    begun = entries.segment == _BEGUN.segment
    """All first chunks are in the scratch."""
    possible: dict[str, Steps] = {}
    if begun or (yield from link.resource(Scratch).prepare()):
        pipeline = pipeline or build()
        pipeline.factors = factors
        possible[SCRATCH] = pipeline.run(begun)
    all_block = entries.segment == _BLOCKING
    if all_block or (way == ATTACH and {0, _BLOCKING}.issuperset(entries.segments.tolist())):
        copies: Copies | None = yield from copied(link, x, entries)
        if copies is not None:
            possible[ATTACH] = _moved(link, move, copies, factors)
    if op is None and all_block and x.nbytes >= MPIS_BYTES:
        possible[MPIS] = messages(link.after())
    yield from ways.run(kind, possible, way) if possible else messages(link.after())


def kind_of(call: Call, x: Array) -> Kind:
    return Kind(call.operation, x.nbytes.bit_length())


def _moved(link: Link, move: Move, access: PeerAccess, factors: list[float] | None) -> Steps:
    move(access, factors)
    yield link.later.Ibarrier()


def all_reduce(link: Link, call: Call, x: Array, op: ReduceOp, *, way: str | None = None) -> Steps:
    messages = functools.partial(fallback.reduction(x.dtype, op).all_reduce, x=x, op=op)
    return _reduce(link, call, x, op, NO_ROOT, messages, way)


def reduce(link: Link, call: Call, x: Array, root: int, op: ReduceOp, *, way: str | None = None) -> Steps:
    messages = functools.partial(fallback.reduction(x.dtype, op).reduce, x=x, root=root, op=op)
    return _reduce(link, call, x, op, root, messages, way)


def _reduce(
    link: Link, call: Call, x: Array, op: ReduceOp, root: int, messages: Callable[[Link], Steps], way: str | None
) -> Steps:
    """Reduce into root's or, without a root, all ranks' ``x``."""
    shots = _in_one_shot if link.size == 2 else _in_two_shots
    build = functools.partial(shots, link, x, op, root)
    return _meet(link, call, x, build, functools.partial(reduce_slice, link, x, op, root), messages, way, op)


def reduce_slice(
    link: Link, x: Array, op: ReduceOp, root: int, access: PeerAccess, factors: list[float] | None
) -> None:
    first, last = _own_slice(link, 0, x.size, x)
    access.reduce_for(op, first, last, range(link.size) if root == NO_ROOT else (root,), link.size, factors)


def _in_one_shot(link: Link, x: Array, op: ReduceOp, root: int) -> Pipeline:
    flat = x.reshape(-1)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        if root != link.rank:
            buffers[link.rank][...] = flat[start:stop]

    def reduce_all(start: int, stop: int, buffers: list[Array], factors: list[float] | None) -> None:
        if root in (NO_ROOT, link.rank):
            rows = list(buffers)
            rows[link.rank] = flat[start:stop]
            reduce_rows(op, rows, (rows[link.rank],), link.size, factors)

    return Pipeline(link, x, x.size, put, reduce_all)


def _in_two_shots(link: Link, x: Array, op: ReduceOp, root: int) -> Pipeline:
    flat = x.reshape(-1)
    gets_result = root in (NO_ROOT, link.rank)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        first, last = _own_slice(link, start, stop, x)
        mine = buffers[link.rank]
        mine[: first - start] = flat[start:first]
        mine[last - start :] = flat[last:stop]

    def reduce_slice(start: int, stop: int, buffers: list[Array], factors: list[float] | None) -> None:
        first, last = _own_slice(link, start, stop, x)
        rows = [buffer[first - start : last - start] for buffer in buffers]
        here = rows[link.rank]
        own = rows[link.rank] = flat[first:last]
        reduce_rows(op, rows, (own, here) if gets_result else (here,), link.size, factors)

    def collect(start: int, stop: int, buffers: list[Array]) -> None:
        if gets_result:
            edges = bounds(stop - start, link.size, x.itemsize)
            for rank, buffer in enumerate(buffers):
                if rank != link.rank:
                    flat[start + edges[rank] : start + edges[rank + 1]] = buffer[edges[rank] : edges[rank + 1]]

    return Pipeline(link, x, x.size, put, reduce_slice, collect)


def _own_slice(link: Link, start: int, stop: int, x: Array) -> tuple[int, int]:
    edges = bounds(stop - start, link.size, x.itemsize)
    return start + edges[link.rank], start + edges[link.rank + 1]


def lies_in_others(part: Array, whole: Array, rank: int) -> bool:
    return np.may_share_memory(part, whole) and address_of(part) != address_of(whole) + rank * part.nbytes


def reduce_scatter(link: Link, call: Call, output: Array, x: Array, op: ReduceOp, *, way: str | None = None) -> Steps:
    if lies_in_others(output, x, link.rank):
        apart = np.empty_like(output)
        yield from reduce_scatter(link, call, apart, x, op, way=way)
        output[...] = apart
        return
    build = functools.partial(_scattering, link, x, output.reshape(-1), op)
    move = functools.partial(reduce_block, link, output, op)
    messages = functools.partial(fallback.reduction(x.dtype, op).reduce_scatter, output=output, x=x, op=op)
    yield from _meet(link, call, x, build, move, messages, way, op)


def reduce_block(link: Link, output: Array, op: ReduceOp, access: PeerAccess, factors: list[float] | None) -> None:
    first, last = link.rank * output.size, (link.rank + 1) * output.size
    access.reduce_into(op, first, last, output.reshape(-1), link.size, factors)


def _scattering(link: Link, x: Array, result: Array, op: ReduceOp) -> Pipeline:
    blocks = x.reshape(link.size, result.size)

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        rows = buffers[link.rank].reshape(link.size, stop - start)
        for rank in range(link.size):
            if rank != link.rank:
                rows[rank] = blocks[rank, start:stop]

    def reduce_slice(start: int, stop: int, buffers: list[Array], factors: list[float] | None) -> None:
        rows = [buffer.reshape(link.size, stop - start)[link.rank] for buffer in buffers]
        rows[link.rank] = blocks[link.rank, start:stop]
        reduce_rows(op, rows, (result[start:stop],), link.size, factors)

    return Pipeline(link, x, result.size, put, reduce_slice, rows=link.size)


def all_gather(link: Link, call: Call, output: Array, x: Array, *, way: str | None = None) -> Steps:
    if lies_in_others(x, output, link.rank):
        x = x.copy()
    source, blocks = as_bytes(x), as_bytes(output).reshape(link.size, -1)
    build = functools.partial(_gathering, link, source, blocks)
    messages = functools.partial(native.all_gather, output=output, x=x)
    yield from _meet(link, call, source, build, lambda access, _: access.gather(blocks), messages, way)


def _gathering(link: Link, source: Array, blocks: Array) -> Pipeline:
    def put(start: int, stop: int, buffers: list[Array]) -> None:
        buffers[link.rank][...] = source[start:stop]

    def take(start: int, stop: int, buffers: list[Array], _: object) -> None:
        for rank, buffer in enumerate(buffers):
            blocks[rank, start:stop] = source[start:stop] if rank == link.rank else buffer

    return Pipeline(link, source, source.size, put, take)


def broadcast(link: Link, call: Call, x: Array, root: int, *, way: str | None = None) -> Steps:
    target = as_bytes(x)
    build = functools.partial(_spreading, link, target, root)
    messages = functools.partial(native.broadcast, x=x, root=root)
    yield from _meet(link, call, target, build, lambda access, _: access.spread(root), messages, way)


def _spreading(link: Link, target: Array, root: int) -> Pipeline:
    def put(start: int, stop: int, buffers: list[Array]) -> None:
        if link.rank == root:
            buffers[root][...] = target[start:stop]

    def take(start: int, stop: int, buffers: list[Array], _: object) -> None:
        if link.rank != root:
            target[start:stop] = buffers[root]

    return Pipeline(link, target, target.size, put, take)


def by(way: str) -> SimpleNamespace:
    """Return these operations with one way for ordinary arrays, for ``MPIDDP_ALGORITHM``."""
    operations = (all_reduce, reduce, reduce_scatter, all_gather, broadcast)
    return SimpleNamespace(**{each.__name__: functools.partial(each, way=way) for each in operations})

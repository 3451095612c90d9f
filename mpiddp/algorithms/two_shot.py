"""Two shots in a node's memory: every rank reduces its slice over all ranks' arrays and writes the result to all.

In the handshake the ranks tell each other where their arrays lie, which decides what follows:

- Symmetric arrays are reduced without a copy, in about the time that one copy would take.
- Other arrays go the way that was the fastest on this machine if all ranks block in the call (see `ways`). One way is
  cross-memory attach, by which a rank reads its slice of the others' arrays piece by piece into its cache, and writes
  the result to them. Another way passes chunks through a scratch, as calls do in which some rank does not block. There,
  two ranks make a single shot if the operation is `reduce` or the array is short: every rank that gets the result
  reduces everything, which saves a barrier. In two shots each rank reads less.

The barriers are MPI's, because a rank that polls a flag in memory would not see that another rank has failed. PyTorch's
symmetric memory and NVIDIA's TensorRT-LLM reduce in the same two shots.
"""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

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
"""How many bytes a pipeline moves at once, so that a part of the array and its copy stay in a core's cache."""
_FEW_CHUNKS = 8
"""The largest number of chunks of an array that two ranks reduce in one shot."""
MPIS_BYTES = 1 << 21
"""The shortest arrays that may go by MPI's own operation. With shorter ones the handshake takes the time that MPI might
save."""
_BEGUN = Location(-1, 0)
_BLOCKING = -2
"""A rank that blocks in the call tells this in place of an ordinary array's segment."""

Step: TypeAlias = Callable[[int, int, list[Array]], None]
"""A function of the start and stop of a chunk in the array, and of all ranks' buffers."""
Take: TypeAlias = Callable[[int, int, list[Array], list[float] | None], None]
"""A `Step` that also gets the ranks' factors of ``PREMUL_SUM``, which are known after the handshake."""


class Pipeline:
    """A pipeline that moves an array through the scratch chunk by chunk: put, barrier, take.

    ``put`` writes a chunk to this rank's buffer. ``take`` reads all ranks' buffers after a barrier, and may write to
    this rank's. ``collect``, if given, reads after another barrier what ``take`` has written on the other ranks. A
    chunk consists of ``rows`` pieces side by side; ``length`` is the number of elements of a row in all chunks
    together.

    One chunk is written while another is read. The first chunk is put before the handshake, if that is possible, so
    that the handshake is its first barrier, too.
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
        """The factors that `run` gives to ``take``. If ``take`` referred to this object, a circle of references would
        keep its arrays alive."""
        self._step = max(min(CHUNK_BYTES, self._scratch.buffer_bytes) // like.itemsize // rows, 1)

    def begin(self) -> bool:
        """Put the first chunk; return False if that is not possible yet.

        It is possible when the scratch has its memory and this rank has no unfinished operations, because all ranks
        count rounds in the order of operations.
        """
        stop = min(self._step, self._length)
        if not self._scratch.ready or len(self._link.queue):
            return False
        self._put(0, stop, self._scratch.next_buffers(self._rows * stop, self._dtype))
        return True

    def run(self, begun: bool) -> Steps:
        """Run all chunks. ``begun`` says that all ranks have put the first chunk before the handshake."""
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


class Part(NamedTuple):
    """One rank's part of an operation."""

    operation: str
    link: Link
    output: Array
    """The array of the result, which is ``x`` if the operation is in place."""
    x: Array
    op: ReduceOp | None = None
    """The reduction; None if the arrays only move."""
    root: int = NO_ROOT

    def flat(self) -> Array:
        """Return ``x`` flat, as bytes where it only moves."""
        return as_bytes(self.x) if self.op is None else self.x.reshape(-1)

    def move(self, access: PeerAccess, factors: list[float] | None) -> None:
        """Do this part where the arrays lie, with the ranks' factors of ``PREMUL_SUM``."""
        rank, size = self.link.rank, self.link.size
        if self.operation == "all_gather":
            access.gather(as_bytes(self.output).reshape(size, -1))
            return
        if self.op is None:
            access.spread(self.root)
            return
        reduce = functools.partial(reduce_rows, self.op, size=size, factors=factors)
        if self.operation == "reduce_scatter":
            out = self.output.reshape(-1)
            access.reduce_into(reduce, rank * out.size, (rank + 1) * out.size, out)
        else:
            ranks = range(size) if self.root == NO_ROOT else (self.root,)
            access.reduce_for(reduce, *_own_slice(self.link, 0, self.x.size, self.x), ranks)

    def pipeline(self) -> Pipeline:
        if self.op is None:
            return _copying(self)
        if self.operation == "reduce_scatter":
            return _scattering(self.link, self.x, self.output.reshape(-1), self.op)
        one = self.link.size == 2 and (self.root != NO_ROOT or self.x.nbytes <= _FEW_CHUNKS * CHUNK_BYTES)
        shots = _in_one_shot if one else _in_two_shots
        return shots(self.link, self.x, self.op, self.root)

    def by(self, module: ModuleType, link: Link, *call: Call, **named: Any) -> Steps:
        """Return the steps of this operation, from the function in ``module`` that has the operation's name."""
        arrays = (self.output, self.x) if self.operation in ("all_gather", "reduce_scatter") else (self.x,)
        options = (each for each in (self.root, self.op) if each not in (NO_ROOT, None))
        steps: Steps = getattr(module, self.operation)(link, *call, *arrays, *options, **named)
        return steps


def _meet(part: Part, call: Call, way: str | None) -> Steps:
    """Meet all ranks, and do the operation.

    Ordinary arrays go by ``way`` if that is possible, and by default as `ways` says. MPI's own operation is one of the
    ways if the call only moves data, so that no sum's bits depend on the choice.
    """
    link, op, x = part.link, part.op, part.flat()
    choice = link.resource(Ways).of(kind_of(call, x))
    pipeline = None
    place = find(x)
    if not place.segment:
        place = Location(_BLOCKING if link.busy else 0, address_of(x))
        if (way or (choice.way if link.busy else SCRATCH)) == SCRATCH:
            pipeline = part.pipeline()
            if pipeline.begin():
                place = _BEGUN
    entries: Entries = yield from handshake.exchange(link, call, place, op)
    factors = None if op is None else entries.factors_of(op)
    rows = entries.views(link, x)
    if rows is not None:
        yield from _moved(part, Views(rows, link.rank), factors)
        return
    begun = entries.segment == _BEGUN.segment
    """True if all ranks have put their first chunks."""
    possible: dict[str, Steps] = {}
    if begun or (yield from link.resource(Scratch).prepare()):
        pipeline = pipeline or part.pipeline()
        pipeline.factors = factors
        possible[SCRATCH] = pipeline.run(begun)
    all_block = entries.segment == _BLOCKING
    if all_block or (way == ATTACH and {0, _BLOCKING}.issuperset(entries.segments.tolist())):
        copies: Copies | None = yield from copied(link, x, entries)
        if copies is not None:
            possible[ATTACH] = _moved(part, copies, factors)
    if op is None and all_block and x.nbytes >= MPIS_BYTES:
        possible[MPIS] = part.by(native, link.after())
    if possible:
        yield from choice.run(possible, way)
    else:
        yield from part.by(native if op is None else fallback.reduction(x.dtype, op), link.after())


def kind_of(call: Call, x: Array) -> Kind:
    return Kind(call.operation, x.nbytes.bit_length())


def _moved(part: Part, access: PeerAccess, factors: list[float] | None) -> Steps:
    part.move(access, factors)
    yield part.link.later.Ibarrier()


def all_reduce(link: Link, call: Call, x: Array, op: ReduceOp, *, way: str | None = None) -> Steps:
    return _meet(Part("all_reduce", link, x, x, op), call, way)


def reduce(link: Link, call: Call, x: Array, root: int, op: ReduceOp, *, way: str | None = None) -> Steps:
    return _meet(Part("reduce", link, x, x, op, root), call, way)


def broadcast(link: Link, call: Call, x: Array, root: int, *, way: str | None = None) -> Steps:
    return _meet(Part("broadcast", link, x, x, root=root), call, way)


def all_gather(link: Link, call: Call, output: Array, x: Array, *, way: str | None = None) -> Steps:
    apart = x.copy() if lies_in_others(x, output, link.rank) else x
    return _meet(Part("all_gather", link, output, apart), call, way)


def reduce_scatter(link: Link, call: Call, output: Array, x: Array, op: ReduceOp, *, way: str | None = None) -> Steps:
    apart = np.empty_like(output) if lies_in_others(output, x, link.rank) else output
    yield from _meet(Part("reduce_scatter", link, apart, x, op), call, way)
    if apart is not output:
        output[...] = apart


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


def _copying(part: Part) -> Pipeline:
    """Return the pipeline that gathers or broadcasts bytes."""
    source, rank = part.flat(), part.link.rank
    targets = {part.root: source}
    if part.root == NO_ROOT:
        targets = dict(enumerate(as_bytes(part.output).reshape(part.link.size, -1)))

    def put(start: int, stop: int, buffers: list[Array]) -> None:
        if rank in targets:
            buffers[rank][...] = source[start:stop]

    def take(start: int, stop: int, buffers: list[Array], _: object) -> None:
        for sender, target in targets.items():
            if sender != rank:
                target[start:stop] = buffers[sender]
            elif target is not source:
                target[start:stop] = source[start:stop]

    return Pipeline(part.link, source, source.size, put, take)


def by(way: str) -> SimpleNamespace:
    """Return this module's operations with one way for ordinary arrays, for programs that ask for this way."""
    operations = (all_reduce, reduce, reduce_scatter, all_gather, broadcast)
    return SimpleNamespace(**{each.__name__: functools.partial(each, way=way) for each in operations})

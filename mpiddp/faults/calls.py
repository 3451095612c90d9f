"""Calls: the record of a collective call, its comparison over the ranks, and the text of a mismatch.

A `Record` is what the ranks compare of a call: three numbers, which equal calls have in every process. `Calls` holds
the ranks' records in memory of the node. A rank publishes its call before it sends, and compares it with the calls of
the other ranks. Of two ranks that disagree, the later one raises before its data moves. The earlier one raises in its
wait, when the group is destroyed, or at the job's end; if it waits inside MPI, its watchdog ends the job. Between
nodes, `handshake` compares calls before their data moves. `between_nodes` compares calls in the background, because
some have no handshake. Some operations compare their calls themselves, and their records are marked. If two marked
calls differ, all ranks raise, and the group goes on.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.message import code_name, dtype_code, dtype_layout
from mpiddp.mpi.operation import Call, label
from mpiddp.mpi.reduction import REDUCTIONS, ReduceOp
from mpiddp.shm.eager import ORDERED, EagerBuffers
from mpiddp.typing import Array

ANY_COUNT = -1
"""The count in the record of a call whose arrays may differ in size between ranks."""
NO_ROOT = -1
_NO_REDUCTION = _NO_DTYPE = 255
_ON_DEVICE = 64
_SELF_COMPARING = 1

_PACKED = struct.Struct("<qQqq")
RECORD = np.dtype([("sequence", "<i8"), ("kind", "<u8"), ("count", "<i8"), ("root", "<i8")])
_NUMBER_BYTES = 8
_WRITTEN_S = 1e-3
"""Time until others see a store, on processors that do not order stores."""
# These bits mark a sequence number in memory, so that no count of elements looks like one.
_MARK = 0x5EA1 << 40
_ROWS = mmap.PAGESIZE // _PACKED.size
REGION_BYTES = mmap.PAGESIZE

_OPERATIONS = (
    *("barrier", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_single", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "all_reduce_coalesced"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("symmetric_empty", "destroy_process_group", "tree_all_reduce", "shared_on_node", "powerSGD"),
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"),
    *("DistributedDataParallel", "check_replicas"),
    # This is a part of another call. If it is short, its record may be in the eager buffers only, under this name.
    "inner all_reduce",
)
BUCKET = "DDP bucket"
"""The name of a call for a bucket of gradients. The record has the bucket's number in place of the layout."""
_names: dict[int, str] = {}


def register_name(name: str) -> int:
    """Return a number for ``name`` that is equal in every process, and remember the name for texts."""
    number = zlib.crc32(name.encode())
    _names.setdefault(number, name)
    return number


for _operation in (*_OPERATIONS, BUCKET):
    register_name(_operation)


class UnknownCallError(MismatchError):
    """The ranks' calls differ, and at least one of them is not known.

    Another operation's message has arrived in place of its record, or later records have overwritten it.
    """


class BlockError(MismatchError):
    """A block of another size than expected arrived, perhaps from another operation."""


class Record(NamedTuple):
    kind: int
    """The operation, dtype, reduction and layout of the call, as one number."""
    length: int
    root: int

    @property
    def name(self) -> str:
        name = _names.get(self.kind >> 32, "another operation")
        return f"{name} {(self.kind >> 17 & _MAX_LAYOUT) - 1}" if name == BUCKET else name

    @property
    def self_comparing(self) -> bool:
        return bool(self.kind & _SELF_COMPARING)

    def marked(self) -> Record:
        return self._replace(kind=self.kind | _SELF_COMPARING)

    def pack(self, sequence: int) -> bytes:
        """Return the record's bytes; sequence 0 stands for none."""
        return _PACKED.pack(sequence, *self)

    def differs(self, other: Record) -> bool:
        """Return True if the calls differ, unless the operations of both compare their calls themselves."""
        if self.self_comparing and other.self_comparing:
            return False
        return (self.kind >> 1, self.length, self.root) != (other.kind >> 1, other.length, other.root)

    def text(self, sequence: int = 0) -> str:
        dtype, reduction = self.kind >> 9 & 0xFF, self.kind >> 1 & 0xFF
        text = self.name + (f" #{sequence}" if sequence else "")
        if dtype != _NO_DTYPE:
            kind = code_name(dtype & ~_ON_DEVICE)
            text += f" of {kind}" if self.length == ANY_COUNT else f" of {self.length} {kind} elements"
            text += " on a device" if dtype & _ON_DEVICE else ""
        if reduction != _NO_REDUCTION:
            text += f" with {REDUCTIONS[reduction].name}"
        return text + (f" and group rank {self.root} as root" if self.root != NO_ROOT else "")


_MAX_LAYOUT = 0x7FFF


def make_call(
    link: Link,
    operation: str,
    inputs: Sequence[Array] = (),
    outputs: Sequence[Array] = (),
    *,
    dtype: np.dtype[Any] | None = None,
    op: ReduceOp | None = None,
    count: int = ANY_COUNT,
    root: int = NO_ROOT,
    layout: str | int = "",
    algorithm: str | None = None,
    note: str = "",
    self_comparing: bool = False,
) -> Call:
    """Return the call of ``operation``.

    ``count`` elements and ``layout`` are to be equal on all ranks. So is the kind of memory, because messages of arrays
    on devices do not match those of host arrays. A ``self_comparing`` operation compares its calls itself. If two
    such calls differ, all ranks raise, and the group goes on.
    """
    arrays, shape = (*outputs, *inputs), None
    dtype = arrays[0].dtype if arrays else dtype
    if outputs:
        shape = outputs[0].shape if len(outputs) == 1 else (sum(x.size for x in outputs),)
    on_device = any(type(x) is not np.ndarray for x in arrays)
    code = _NO_DTYPE if dtype is None else dtype_code(dtype) | _ON_DEVICE * on_device
    if isinstance(layout, str):
        text = layout + ("" if dtype is None else dtype_layout(dtype))
        digest = zlib.crc32(text.encode()) % _MAX_LAYOUT + 1 if text else 0
    else:
        digest = layout % _MAX_LAYOUT + 1
    reduction = _NO_REDUCTION if op is None else op.value
    name = register_name(note or label(operation, algorithm))
    record = Record(name << 32 | digest << 17 | code << 9 | reduction << 1, count, root)
    return Call(
        link.members,
        operation,
        dtype,
        shape,
        algorithm=algorithm,
        note=f"{note} {layout}" if note == BUCKET else note,
        record=record.marked() if self_comparing else record,
    )


def mismatch(group: object, rank: int, call: str, other_rank: int, other: str) -> MismatchError:
    first, second = sorted([(rank, call), (other_rank, other)])
    layout = " (the sizes or the kinds of dtypes in their lists or trees differ)" if call == other else ""
    return MismatchError(
        f"the ranks of {group} disagree: rank {first[0]} calls {first[1]}, rank {second[0]} calls {second[1]}{layout};"
        " all ranks must call the same operations in the same order, with the same sizes, dtypes, reductions and roots",
        (first[0], second[0]),
    )


def compare_records(link: Link, records: Array) -> None:
    """Raise `MismatchError` unless ``records``, int64 of shape (ranks, 4), are all of one call."""
    same = records[:, 1:] == records[0, 1:]
    if not same.all():
        odd = int(same.all(1).argmin())
        first, other = (_PACKED.unpack(records[rank].tobytes()) for rank in (0, odd))
        if any(kind >> 32 not in _names for _, kind, *_ in (first, other)):
            raise UnknownCallError(
                f"the ranks of {link} disagree: rank {link.ranks[0]} or {link.ranks[odd]} is in another operation"
            )
        raise _mismatch_of(link, (0, *first), (odd, *other))


def _mismatch_of(link: Link, *records: tuple[int, ...]) -> MismatchError:
    """Return the error of two ranks' records, each with the group rank in front.

    A record may be of a part of a call, or of a later call. So the error names the calls that the two ranks have
    published on this node under the lower of the records' numbers, if there are any.
    """
    published, number = link.find(Calls), min(record[1] for record in records)
    ranks = [link.ranks[record[0]] for record in records]
    texts = [Record(*record[2:]).text(record[1]) for record in records]
    if published is not None and number:
        whole = [published.text(rank, number) or text for rank, text in zip(ranks, texts, strict=True)]
        texts = whole if whole[0] != whole[1] else texts
    return mismatch(link, ranks[0], texts[0], ranks[1], texts[1])


@functools.lru_cache(maxsize=256)
def _rest(call: Record) -> bytes:
    """Return the bytes of a record behind its number."""
    return call.pack(0)[_NUMBER_BYTES:]


class Calls(Resource):
    """A group's records on one node: `REGION_BYTES` of ``memory`` a rank.

    A row has one record of each rank. To store a record, a rank first erases the old number and stores the new one
    last. If processors keep the order of stores, a record is whole if its number is the same before and after a read.
    On other processors a mismatch counts only if it is still there after `_WRITTEN_S`. Rows are reused, so a rank that
    is `_ROWS` calls ahead, as the root of broadcasts may be, is not compared.
    """

    def __init__(self, link: Link, memory: mmap.mmap | bytearray) -> None:
        self.link = link
        shared = isinstance(memory, mmap.mmap)
        node = link.node
        self._ranks = node.ranks if shared else link.ranks[link.rank : link.rank + 1]
        self._rank = node.rank if shared else 0
        self._size = len(self._ranks)
        self._memory = memory
        self._table = np.frombuffer(memory, RECORD, _ROWS * self._size).reshape(_ROWS, self._size)
        self.ordered = shared and ORDERED
        """True if the number in a rank's record shows that the rank has made that call."""
        self._row_bytes = self._size * _PACKED.size
        words, step = memoryview(memory).cast("q"), _PACKED.size // _NUMBER_BYTES
        self._numbers = [words[row * self._size * step :: step][: self._size] for row in range(_ROWS)]
        """For each row, the numbers of all ranks' records."""
        self._own = self._rank * _PACKED.size
        starts = range(self._own + _NUMBER_BYTES, _ROWS * self._row_bytes, self._row_bytes)
        self._own_calls = [slice(start, start + _PACKED.size - _NUMBER_BYTES) for start in starts]
        """For each row, where this rank's record lies in the memory, without its number."""
        self._distant = not link.one_node
        self.latest = 0
        """The number of the last call, in a group on several nodes."""
        self._unconfirmed: dict[int, int] = {}
        """For each row, the number of its call, if some rank of the node had not made the call at the last look."""

    def publish(self, sequence: int, call: Record) -> bool:
        """Store this rank's record. Return True if all ranks of the node have made the call.

        MismatchError if a rank has made another call.
        """
        number, place, rank = _MARK | sequence, sequence % _ROWS, self._rank
        numbers = self._numbers[place]
        numbers[rank] = 0
        self._memory[self._own_calls[place]] = _rest(call)
        numbers[rank] = number
        if self._distant:
            if not call.self_comparing:
                self.link.history = hash((self.link.history, *call))
            self.latest = sequence
        self._unconfirmed[place] = sequence
        if numbers.tolist().count(number) == 1 < self._size:
            return False
        return self._compare(sequence)

    def _judge(self, sequence: int) -> None:
        if not ORDERED:
            time.sleep(_WRITTEN_S)
        calls = self._row(sequence)
        number, mine = calls[self._rank]
        if number != sequence:
            return
        for rank, (arrived, call) in enumerate(calls):
            if arrived == sequence and call.differs(mine):
                own, other = self._ranks[self._rank], self._ranks[rank]
                raise mismatch(self.link, own, mine.text(sequence), other, call.text(sequence))

    def _row(self, sequence: int) -> list[tuple[int, Record]]:
        """Return each rank's sequence number and record. Number 0 stands for a record that is being stored."""
        row = self._table[sequence % _ROWS]
        before, records, after = row["sequence"].tolist(), row.tolist(), row["sequence"].tolist()
        return [
            (first & ~_MARK if first & _MARK == _MARK and first == last else 0, Record(*fields))
            for first, (_, *fields), last in zip(before, records, after, strict=True)
        ]

    def made_by_all(self, sequence: int) -> bool:
        """Return True if all ranks of the node have made this call, or a later one in its row."""
        return min(self._numbers[sequence % _ROWS]) >= _MARK | sequence

    def verify(self, sequence: int) -> None:
        """Compare a finished call. If a rank has not made it yet, `check` compares it again later."""
        if self._unconfirmed.get(sequence % _ROWS) == sequence:
            self._compare(sequence)

    def check(self) -> None:
        for sequence in tuple(self._unconfirmed.values()):
            self._compare(sequence)

    def _compare(self, sequence: int) -> bool:
        """Return True if all ranks of the node have made the call; MismatchError if one made another.

        In the first case, and if the row has been reused, the call is not compared again.
        """
        place = sequence % _ROWS
        row = self._memory[place * self._row_bytes : (place + 1) * self._row_bytes]
        record = row[self._own : self._own + _PACKED.size]
        number, alike = record[:_NUMBER_BYTES], row.count(record)
        reused = number != (_MARK | sequence).to_bytes(_NUMBER_BYTES, "little")
        if not reused and row.count(number) != alike:
            self._judge(sequence)
        if (reused or alike == self._size) and self._unconfirmed.get(place) == sequence:
            self._unconfirmed.pop(place, None)  # another thread may have taken the call out
        return alike == self._size

    def recent(self, rank: int | None = None) -> Array:
        """Return the last records of a rank of this node, by default of this rank.

        Sequence number 0 stands for a row that has not been used.
        """
        mine = self._table[:, self._rank if rank is None else self._ranks.index(rank)].copy()
        marked = mine["sequence"] & _MARK == _MARK
        mine["sequence"] = np.where(marked, mine["sequence"] & ~_MARK, 0)
        return mine

    def text(self, rank: int, sequence: int) -> str:
        number, call = self._row(sequence)[self._ranks.index(rank)] if rank in self._ranks else (0, None)
        return call.text(sequence) if call is not None and number == sequence else ""

    def close(self) -> None:
        """Unmap the memory at once. The watchdog's thread then finds no records."""
        self._unconfirmed.clear()
        self._table = np.empty((0, self._size), RECORD)
        del self._memory, self._numbers


def last_call(link: Link, rank: int) -> str:
    """Return the last call of this rank or another one of its node; "" if it is not known."""
    published, buffers, records = link.find(Calls), link.find(EagerBuffers), list[tuple[int, ...]]()
    with contextlib.suppress(AttributeError, ValueError):  # the group is being destroyed, or has no such rank
        if published is not None:
            records += map(tuple, published.recent(rank).tolist())
        if buffers is not None:
            records += [each[1:] for found in buffers.calls() for each in found if link.ranks[each[0]] == rank]
    sequence, *fields = max(records, default=(0,))
    return Record(*fields).text(sequence) if sequence > 0 else ""


def _by_number(records: Array) -> dict[int, Record]:
    return {sequence: Record(*fields) for sequence, *fields in records.tolist() if sequence}


def difference(group: object, ranks: Sequence[int], recent: Iterable[Array]) -> MismatchError | None:
    """Return the error of the first call of which the ranks' records differ."""
    rows = list(map(_by_number, recent))
    for sequence in sorted(set.intersection(*map(set, rows))):
        for rank, row in enumerate(rows):
            first, other = rows[0][sequence], row[sequence]
            if other.differs(first):
                return mismatch(group, ranks[0], first.text(sequence), ranks[rank], other.text(sequence))
    return None


def first_difference(
    group: object, ranks: Sequence[int], recent: Iterable[Array], *, ended: bool = False
) -> MismatchError:
    """Return the error for ranks whose calls are known to differ; ``ended`` says that no rank makes another call."""
    error = difference(group, ranks, recent)
    if error is not None:
        return error
    rows = list(map(_by_number, recent))
    latest = [max(row, default=0) for row in rows]
    least, most = min(latest), max(latest)
    if ended and least < most:
        ahead, behind = latest.index(most), latest.index(least)
        text = next(row[number].text(number) for row in [rows[ahead]] for number in sorted(row) if number > least)
        return mismatch(group, ranks[ahead], text, ranks[behind], f"nothing after #{least}")
    return UnknownCallError(f"the ranks of {group} made different calls long ago, which are not known any more")


def compare_eager(link: Link, rounds: Sequence[Sequence[tuple[int, int, int, int, int]]]) -> None:
    """Raise `MismatchError` if calls differ in a round of `EagerBuffers.calls`, which may hold parts of calls."""
    for first, *others in rounds:
        for other in others:
            if other[1:] != first[1:]:
                raise _mismatch_of(link, first, other)

"""What the ranks of a group are calling, side by side: so ranks that disagree are found, and what each called is known.

Every rank writes its calls, numbered, into memory that all ranks of the node see, before it sends anything, and looks
at what the others have written: the later of two ranks that disagree raises before its data moves. Who was earlier
looks again when its operation has finished, or finds out while it waits (see `Work` and `watchdog`). It costs some
stores and loads, and no message. Between nodes, where nothing is shared, every rank keeps a number that stands for all
its calls so far; `agreement` compares it wherever a few bytes are exchanged anyway.

What is written is the operation, dtype, element count, reduction and root; of operations whose arrays may differ from
rank to rank, as much of it as may not. An operation that compares its calls itself before it begins says so, and is
left to do it: then all ranks raise the same error and the group goes on.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from mpiddp.errors import MismatchError
from mpiddp.mpi.message import code_name
from mpiddp.mpi.reduction import REDUCTIONS
from mpiddp.mpi.work import Steps

ANY_COUNT = -1
"""The count of an operation whose arrays may differ in it from rank to rank."""
NO_ROOT = -1
NO_REDUCTION = NO_DTYPE = 255
ON_DEVICE = 64  # beside the code of a dtype

AGREES = 1
"""What is added to the kind of an operation that compares the ranks' calls itself."""

_CALL = struct.Struct("<qQqq")
_NUMBER_BYTES = 8
# Stands before the number in memory, so that no count is taken for it.
_MARK = 0x5EA1 << 40
_pack = _CALL.pack
_ROWS = mmap.PAGESIZE // _CALL.size
REGION_BYTES = mmap.PAGESIZE
"""What a board takes for each rank."""

_OPERATIONS = (
    *("barrier", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_single", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "all_reduce_coalesced"),
    *("reduce_scatter_single_coalesced", "all_gather_single_coalesced", "all_gather_coalesced"),
    *("all_gather_into_tensor_coalesced", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "symmetric_empty", "new_group"),
)


def _number(name: str) -> int:
    """Return the same number for an operation's name in every process."""
    return zlib.crc32(name.encode())


_names = {_number(name): name for name in _OPERATIONS}


class Call(NamedTuple):
    """A call as the board knows it."""

    sequence: int
    """Which one of the group's operations it is, from 1 on; 0 where that is not known."""
    kind: int
    """What `kind` has made of the operation, dtype and reduction."""
    length: int
    """Elements, where all ranks give as many; `ANY_COUNT` elsewhere."""
    root: int
    """Group rank of the root, or `NO_ROOT`."""

    @property
    def agrees(self) -> bool:
        """Whether the operation compares the ranks' calls itself."""
        return bool(self.kind & AGREES)

    def disagrees(self, other: Call) -> bool:
        """Tell whether two ranks cannot both make these calls, and nobody else would notice."""
        if self.sequence != other.sequence or (self.agrees and other.agrees):
            return False
        return (self.kind >> 1, self.length, self.root) != (other.kind >> 1, other.length, other.root)

    def __str__(self) -> str:
        """Return the call as a person would name it."""
        name, layout, dtype, reduction = self.kind >> 32, self.kind >> 17 & 0x7FFF, self.kind >> 9, self.kind >> 1
        text = _names.get(name, "another operation") + (f" #{self.sequence}" if self.sequence else "")
        return text + describe(dtype & 0xFF, self.length, reduction & 0xFF, self.root, layout)


def describe(dtype: int, count: int, reduction: int, root: int, layout: int = 0) -> str:
    """Return what follows the name of an operation when a person names a call."""
    text = ""
    if dtype != NO_DTYPE:
        name = code_name(dtype & ~ON_DEVICE)
        text += f" of {name}" if count == ANY_COUNT else f" of {count} {name} elements"
        text += " on a device" if dtype & ON_DEVICE else ""
    if layout:
        text += f" in arrays whose layouts come to 0x{layout:x}"
    if reduction != NO_REDUCTION:
        text += f" with {REDUCTIONS[reduction].name}"
    return text + (f" and group rank {root} as root" if root != NO_ROOT else "")


_comparing: set[Callable[..., Steps]] = set()
_Algorithm = TypeVar("_Algorithm", bound=Callable[..., Steps])


def comparing(algorithm: _Algorithm) -> _Algorithm:
    """Note that the first thing an algorithm does is to compare the calls of all ranks; a decorator."""
    _comparing.add(algorithm)
    return algorithm


def compares(algorithm: Callable[..., Steps]) -> bool:
    """Tell whether an algorithm has been noted as `comparing`."""
    return algorithm in _comparing


def checksum(layout: str) -> int:
    """Return 15 bits that stand for a layout: 0 for none."""
    return zlib.crc32(layout.encode()) % 0x7FFF + 1 if layout else 0


def kind(
    name: str, dtype: int = NO_DTYPE, reduction: int = NO_REDUCTION, layout: str = "", agrees: bool = False
) -> int:
    """Return one number for all of a call that depends neither on its count nor on its root.

    Parameters
    ----------
    name : str
        The operation.
    dtype : int
        The code of the dtype that all ranks must give.
    reduction : int
        The ``value`` of the `ReduceOp`.
    layout : str
        Whatever else must be equal on all ranks.
    agrees : bool
        Whether the operation compares the ranks' calls itself.
    """
    number = _number(name)
    _names.setdefault(number, name)
    return number << 32 | checksum(layout) << 17 | dtype << 9 | reduction << 1 | agrees


class Board:
    """The calls of a group's ranks on one node.

    Parameters
    ----------
    memory : mmap or bytearray
        `REGION_BYTES` for each rank; of this process alone, where nothing is shared.
    ranks : tuple of int
        World ranks of those who share it.
    rank : int
        This process's place among them.
    group : str
        What the group is called.
    distant : bool
        Whether the group has ranks on other nodes too.

    Notes
    -----
    A row has one call of every rank: that whose number gives this remainder. Stores reach other ranks in an order of
    the processor's own, so a call is only taken as written where its number is read together with all the rest of it
    after a synchronisation, or again some time later. A row is used again after a page's worth of calls: of a rank that
    is further ahead than that, as the root of many broadcasts may be, nothing is found out here.
    """

    def __init__(
        self, memory: mmap.mmap | bytearray, ranks: tuple[int, ...], rank: int, group: str, distant: bool
    ) -> None:
        self._memory = memory
        self._ranks, self._rank = ranks, rank
        self._group = group
        self._distant = distant
        self._size = len(ranks)
        self._row_bytes = self._size * _CALL.size
        self._place = rank * _CALL.size
        self.history = 0
        """Stands for this rank's calls that nobody has compared, the same on all ranks that have made the same ones."""
        self.open: dict[int, bytes] = {}
        """The calls, by number, that are on their way and that some rank of the node had not come to."""

    def write(self, sequence: int, kind: int, count: int, root: int) -> bytes:
        """Write a call for the others to see, and return what was written."""
        call = _pack(_MARK | sequence, kind, count, root)
        mine = sequence % _ROWS * self._row_bytes + self._place
        self._memory[mine : mine + _CALL.size] = call
        return call

    def post(self, sequence: int, kind: int, count: int, root: int) -> bool:
        """Write a call, and tell whether all ranks of the node have made the same.

        Raises
        ------
        MismatchError
            If one has made another.
        """
        call = self.write(sequence, kind, count, root)
        if self._distant and not kind & AGREES:
            self.history = hash((self.history, kind, count, root))
        start = sequence % _ROWS * self._row_bytes
        row = self._memory[start : start + self._row_bytes]
        if row == call * self._size:
            return True
        self.open[sequence] = call
        if row.count(call[:_NUMBER_BYTES]) != row.count(call):
            self._judge(sequence)
        return False

    def compare(self, sequence: int) -> None:
        """Compare an open call with what the ranks of the node have written under its number.

        Raises
        ------
        MismatchError
            If they have made different calls. Who has not come, or is far ahead, is left out.
        """
        call = self.open.get(sequence)
        if call is not None:
            start = sequence % _ROWS * self._row_bytes
            row = self._memory[start : start + self._row_bytes]
            if row != call * self._size and row.count(call[:_NUMBER_BYTES]) != row.count(call):
                self._judge(sequence)

    def close(self, sequence: int) -> None:
        """Compare a call that has come to its end for the last time; raises as `compare`."""
        if sequence in self.open:
            self.compare(sequence)
            self.open.pop(sequence, None)

    def _judge(self, sequence: int) -> None:
        """Raise if ranks that have written a call of this number have not written the same one."""
        calls = self.row(sequence)
        mine = calls[self._rank]
        for rank, call in enumerate(calls):
            if call.disagrees(mine) and mine.sequence == sequence:
                raise MismatchError(disagreement(self._group, self._ranks[self._rank], mine, self._ranks[rank], call))

    def row(self, sequence: int) -> list[Call]:
        """Return the calls that are written where those of this number belong, one of each rank."""
        start = sequence % _ROWS * self._row_bytes
        rows = _CALL.iter_unpack(self._memory[start : start + self._row_bytes])
        return [Call(number & ~_MARK, *fields) for number, *fields in rows]

    def recent(self) -> list[Call]:
        """Return the last calls of this rank, those of long ago left out."""
        calls = [self.row(row)[self._rank] for row in range(_ROWS)]
        return sorted(call for call in calls if call.sequence)


def packed(calls: list[Call]) -> bytes:
    """Return calls as bytes, of the same length on all ranks."""
    return b"".join(_CALL.pack(*call) for call in calls).ljust(_ROWS * _CALL.size, b"\0")


def unpacked(memory: bytes) -> dict[int, Call]:
    """Return the calls of a rank by their numbers, from what `packed` has made of them."""
    calls = [Call(*fields) for fields in _CALL.iter_unpack(memory)]
    return {call.sequence: call for call in calls if call.sequence}


def disagreement(group: str, rank: int, call: object, other_rank: int, other: object) -> str:
    """Return the text of the error of two ranks that disagree; the lower one is named first."""
    first, second = sorted([(rank, str(call)), (other_rank, str(other))])
    return (
        f"the ranks of {group} disagree: rank {first[0]} calls {first[1]}, rank {second[0]} calls {second[1]}; all"
        " ranks must call the same operations in the same order, with the same sizes, dtypes, reductions and roots"
    )

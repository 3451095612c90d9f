"""Collectives on device arrays through pinned host memory: copy down, an algorithm of the host, copy up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpiddp.device import is_device_array, pinned, stream, transfer
from mpiddp.device.place import Place, place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

Access: TypeAlias = tuple[Sequence[Array], Sequence[Array]]
"""The arrays that this rank's part of an operation reads, and those that it writes."""


class HostCopies:
    """Arrays and their copies in pinned memory; a host array stands for itself."""

    def __init__(self, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        self._reads = [x for x in reads if is_device_array(x)]
        self._writes = [x for x in writes if is_device_array(x)]
        arrays = {id(x): x for x in (*self._reads, *self._writes)}
        self._memory = {key: pinned.take(x.nbytes) for key, x in arrays.items()}
        self._copies = {key: self._memory[key][: x.nbytes].view(x.dtype).reshape(x.shape) for key, x in arrays.items()}
        one_of_each = {place_of(x): x for x in arrays.values()}
        self._begin = {place: (x, stream.ready(x)) for place, x in one_of_each.items()}

    def of(self, given: Any) -> Any:
        """Return copies of arrays, also in lists, and all else as it is."""
        if isinstance(given, (list, tuple)):
            return [self.of(each) for each in given]
        return self._copies.get(id(given), given)

    def _sides(self, role: str) -> dict[Place, Any]:
        """Return a stream of each device, behind the work queued at submission."""
        sides = {}
        for place, (x, begin) in self._begin.items():
            sides[place] = stream.side(role, x)
            stream.follow(sides[place], begin)
        return sides

    def down(self) -> Steps:
        sides = self._sides("down")
        for x in self._reads:
            transfer.down(self._memory[id(x)], x, sides[place_of(x)])
        for side in sides.values():
            yield stream.mark(side)

    def up(self) -> Steps:
        sides = self._sides("up")
        for x in self._writes:
            transfer.up(x, self._memory[id(x)], sides[place_of(x)])
        for side in sides.values():
            yield stream.mark(side)
        for memory in self._memory.values():
            pinned.give(memory)


def through_host(host: Callable[..., Steps], link: Link, call: Call | None, access: Access, *args: Any) -> Steps:
    copies = HostCopies(*access)
    yield from copies.down()
    yield from host(link.after(), call, *(copies.of(each) for each in args))
    yield from copies.up()


def _broadcast(link: Link, x: Array, root: int) -> Access:
    return ([x], []) if link.rank == root else ([], [x])


def _reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Access:
    return [x], [x] if link.rank == root else []


_ACCESS: dict[str, Callable[..., Access]] = {
    "broadcast": _broadcast,
    "all_reduce": lambda link, x, op: ([x], [x]),
    "reduce": _reduce,
    "reduce_scatter": lambda link, output, x, op: ([x], [output]),
    "all_gather": lambda link, output, x: ([x], [output]),
    "all_gather_list": lambda link, outputs, x: ([x], outputs),
    "gather": lambda link, outputs, x, root: ([x], outputs or ()),
    "scatter": lambda link, x, inputs, root: (inputs or (), [x]),
    "all_to_all": lambda link, outputs, inputs: (inputs, outputs),
    "all_to_all_single": lambda link, output, x, *counts: ([x], [output]),
}


def around(operation: str, host: Callable[..., Steps]) -> Callable[..., Steps]:
    """Return the steps of an operation on device arrays by those on arrays of the host."""
    access = _ACCESS[operation]
    return lambda link, call, *args: through_host(host, link, call, access(link, *args), *args)

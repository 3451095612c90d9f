"""Collectives on device arrays through pinned host memory: copy down, an algorithm of the host, copy up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.device import is_device_array, pinned, stream, transfer
from mpiddp.device.place import Place, place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

Algorithm = Callable[..., Steps]
"""Steps on arrays of the host."""


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


def through_host(
    algorithm: Algorithm, link: Link, call: Call | None, reads: Sequence[Array], writes: Sequence[Array], *args: Any
) -> Steps:
    host = HostCopies(reads, writes)
    yield from host.down()
    yield from algorithm(link.after(), call, *(host.of(each) for each in args))
    yield from host.up()


def broadcast(host: Algorithm, link: Link, call: Call, x: Array, root: int) -> Steps:
    mine = link.rank == root
    return through_host(host, link, call, [x] if mine else [], [] if mine else [x], x, root)


def all_reduce(host: Algorithm, link: Link, call: Call, x: Array, op: ReduceOp) -> Steps:
    return through_host(host, link, call, [x], [x], x, op)


def reduce(host: Algorithm, link: Link, call: Call, x: Array, root: int, op: ReduceOp) -> Steps:
    return through_host(host, link, call, [x], [x] if link.rank == root else [], x, root, op)


def reduce_scatter(host: Algorithm, link: Link, call: Call, output: Array, x: Array, op: ReduceOp) -> Steps:
    return through_host(host, link, call, [x], [output], output, x, op)


def all_gather(host: Algorithm, link: Link, call: Call, output: Array, x: Array) -> Steps:
    return through_host(host, link, call, [x], [output], output, x)


def all_gather_list(host: Algorithm, link: Link, call: Call, outputs: Sequence[Array], x: Array) -> Steps:
    return through_host(host, link, call, [x], outputs, outputs, x)


def gather(host: Algorithm, link: Link, call: Call, outputs: Sequence[Array] | None, x: Array, root: int) -> Steps:
    return through_host(host, link, call, [x], outputs or (), outputs, x, root)


def scatter(host: Algorithm, link: Link, call: Call, x: Array, inputs: Sequence[Array] | None, root: int) -> Steps:
    return through_host(host, link, call, inputs or (), [x], x, inputs, root)


def all_to_all(host: Algorithm, link: Link, call: Call, outputs: Sequence[Array], inputs: Sequence[Array]) -> Steps:
    return through_host(host, link, call, inputs, outputs, outputs, inputs)


def all_to_all_single(
    host: Algorithm,
    link: Link,
    call: Call,
    output: Array,
    x: Array,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
) -> Steps:
    return through_host(host, link, call, [x], [output], output, x, output_counts, input_counts)

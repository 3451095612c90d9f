"""Collectives on device arrays through pinned host memory: copy down, an algorithm of the host, copy up."""

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


def through_host(host: Callable[..., Steps], link: Link, call: Call | None, access: Access, *args: Any) -> Steps:
    """Run ``host``, the steps for host arrays, on copies in pinned memory. Host arrays are passed as they are."""
    reads, writes = ([x for x in xs if is_device_array(x)] for xs in access)
    arrays = {id(x): x for x in (*reads, *writes)}
    memory = {key: pinned.take(x.nbytes) for key, x in arrays.items()}
    copies = {key: memory[key][: x.nbytes].view(x.dtype).reshape(x.shape) for key, x in arrays.items()}
    one_of_each = {place_of(x): x for x in arrays.values()}
    begin = {place: stream.ready(x) for place, x in one_of_each.items()}

    def sides(role: str) -> dict[Place, Any]:
        """Return a stream of each device, made to wait for the work that was queued before the call."""
        found = {place: stream.side(role, x) for place, x in one_of_each.items()}
        for place, side in found.items():
            stream.follow(side, begin[place])
        return found

    down = sides("down")
    for x in reads:
        transfer.down(memory[id(x)], x, down[place_of(x)])
    for side in down.values():
        yield stream.mark(side)
    yield from host(link.after(), call, *_replaced(args, copies))
    up = sides("up")
    for x in writes:
        transfer.up(x, memory[id(x)], up[place_of(x)])
    for side in up.values():
        yield stream.mark(side)
    for each in memory.values():
        pinned.give(each)


def _replaced(given: Any, copies: dict[int, Array]) -> Any:
    """Return ``given`` with each array, also in lists, replaced by its copy if it has one."""
    if isinstance(given, (list, tuple)):
        return [_replaced(each, copies) for each in given]
    return copies.get(id(given), given)


def _broadcast(link: Link, x: Array, root: int) -> Access:
    return ([x], []) if link.rank == root else ([], [x])


def _reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Access:
    return [x], [x] if link.rank == root else []


ACCESS: dict[str, Callable[..., Access]] = {
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
    """Return the steps of an operation on device arrays, which run ``host``, the steps on host arrays, on copies."""
    access = ACCESS[operation]
    return lambda link, call, *args: through_host(host, link, call, access(link, *args), *args)

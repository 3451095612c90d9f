"""Plans, and the table that selects algorithms. A plan has all of a call that does not depend on its arrays' values.

All ranks must select the same algorithm, so selection uses only facts that are equal on all ranks. An array may be in
symmetric memory on some ranks and not on others; the shared-memory algorithms exchange that before data moves.
"native" is MPI's own algorithm, or the one that `fallback` chooses. The argument ``algorithm="ring"`` goes before
``MPIDDP_ALGORITHM=all_reduce:ring``, which goes before the table.

A function of the link and the arrays is called an algorithm in this module. A function of the link, the call and the
arrays is called steps. It compares the ranks' calls before data moves, or leaves that to the records of `faults.calls`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from mpiddp import settings
from mpiddp.errors import DistError
from mpiddp.faults.calls import ANY_COUNT, BUCKET, NO_ROOT, Calls, make_call, register_name
from mpiddp.mpi.link import Link, Resource
from mpiddp.mpi.operation import Call, label
from mpiddp.mpi.reduction import ReduceOp, check
from mpiddp.mpi.requests import Steps
from mpiddp.mpi.work import Work
from mpiddp.shm.eager import EagerBuffers, SpinWait
from mpiddp.typing import Array

from . import exact_sum, exchange, fallback, handshake, hierarchical, native, one_shot, ring, short, tree, two_shot
from .blocks import Blocks, Cut
from .direct import Direct
from .gpu import table as device_table
from .one_shot import OneShot
from .ways import ATTACH, SCRATCH

Rows: TypeAlias = tuple[tuple[float, str], ...]
"""Pairs of a limit in bytes and the algorithm for arrays up to it, in ascending order."""

WAYS = {way: two_shot.by(way) for way in (SCRATCH, ATTACH)}
"""Variants of `two_shot` in which ordinary arrays go one given way."""
MODULES: dict[str, ModuleType | SimpleNamespace] = {
    "native": native,
    "two_shot": two_shot,
    **WAYS,
    "hierarchical": hierarchical,
    "exchange": exchange,
    "ring": ring,
    "tree": tree,
}
"""The modules by the name of their algorithm. A module has a function for every operation that it can do."""
_SELF_COMPARING = (two_shot, *WAYS.values(), hierarchical)
"""The modules among `MODULES` whose functions are steps. The functions of the others are algorithms."""

_WITH_ALL_ROWS = ("one_shot", "two_shot", "short", *WAYS)
"""The algorithms that have all ranks' arrays at hand when they reduce, so that they can add in any order. `exchange`
can do so, too."""
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_IN_MEMORY = ("one_shot", "two_shot", *WAYS)
ANY_SIZE = float("inf")
_PIECES_BYTES, _PIECES_OF_MANY_BYTES = 1 << 22, 1 << 19
"""The longest ordinary arrays that may go through the eager buffers in pieces, in groups of up to four ranks and in
larger ones."""
_SCALED_PIECES_BYTES = 1 << 20
"""The longest ordinary array of a PREMUL_SUM that goes in pieces, unless the limit above is lower. Up to the limit such
arrays go no other way, and longer ones never go in pieces. In pieces the addends are scaled. The other ways scale the
sum if all ranks have the same power of two as their factor. That gives other bits where numbers underflow, so the
choice must not depend on the time that a way takes."""
_KIB = 1 << 10

# Measured on 2 and 4 ranks on 2 cores, MPICH 5.0 and Open MPI 5.0 (`python -m mpiddp bench tune`). Bytes are of the
# largest array.
ONE_NODE: dict[str, Rows] = dict.fromkeys(
    ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"),
    ((64 * _KIB, "one_shot"), (ANY_SIZE, "two_shot")),
)
CROWDED: dict[str, Rows] = {
    **dict.fromkeys(ONE_NODE, ((512 * _KIB, "one_shot"), (ANY_SIZE, "two_shot"))),
    **dict.fromkeys(("all_reduce", "reduce"), ((256 * _KIB, "one_shot"), (ANY_SIZE, "two_shot"))),
}
"""Rows for groups in which a round takes long, because there are more ranks than cores, or no eager buffers, so that
MPI sends messages."""
_SHORT = (handshake.SLOT_BYTES, "short")
SEVERAL_NODES: dict[str, Rows] = {
    **dict.fromkeys(ONE_NODE, (_SHORT, (ANY_SIZE, "native"))),
    "all_reduce": (_SHORT, (256 * _KIB, "native"), (ANY_SIZE, "hierarchical")),
}

ONE_ORDER: dict[str, Rows] = {"all_reduce": ((0, "short"), (ANY_SIZE, "hierarchical"))}
"""Rows between nodes under ``MPIDDP_DETERMINISTIC=1``, by which arrays of all sizes are added in one order."""


@dataclass(slots=True, eq=False)
class Plan:
    call: Call
    steps: Callable[..., Steps]
    """The function that returns the steps of a call, given the link, the call, and the arguments."""
    run: Callable[[Sequence[Any], Sequence[Array] | None], Work | None] | None = None
    """The function that makes the call at once, through the eager buffers (`OneShot.run`). If it is None, the caller
    drives the steps."""


class Plans(Resource):
    _MAX = 256

    def __init__(self, link: Link) -> None:
        self._plans: dict[Any, Plan] = {}
        self.get = self._plans.get

    def remember(self, key: Any, plan: Plan) -> Plan:
        if len(self._plans) >= self._MAX:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def forget(self, error: DistError | None = None) -> None:
        self._plans.clear()

    close = drop = forget  # the next call of an aborted group has to make a plan, and finds it aborted


_ROWS_OF = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "tree_all_reduce": "all_reduce",
}
for _name in (*ONE_NODE, *_ROWS_OF):
    for _algorithm in (*MODULES, "one_shot", *device_table.ALGORITHMS):
        register_name(label(_name, _algorithm))  # errors also name algorithms that only other ranks have asked for


def make(
    link: Link,
    name: str,
    algorithm: str | None,
    output: Array,
    x: Array,
    op: ReduceOp | None = None,
    root: int = NO_ROOT,
    *,
    count: int | None = None,
    layout: str = "",
    bucket: int | None = None,
    inner: bool = False,
) -> Plan:
    """Return the plan of a call; ValueError if the requested algorithm cannot do it in this group.

    For an operation in place ``output`` is ``x``. All ranks must have the same ``count`` (by default the elements of
    ``x``) and ``layout``. ``bucket`` is the number of a DDP bucket. An ``inner`` call is a part of a call that the
    ranks have compared.
    """
    operation = _ROWS_OF.get(name, name)
    if operation in _REDUCING:
        check(x.dtype, op)  # it refuses anything that is no ReduceOp
    call = make_call(
        link,
        name,
        (x,),
        (output,),
        op=op if bucket is None else None,  # errors need not name a bucket's reduction, which DDP has chosen
        count=x.size if count is None else count,
        root=root,
        layout=layout if bucket is None else bucket,
        algorithm=algorithm,
        note=BUCKET if bucket is not None else f"inner {name}" if inner else "",
    )
    if op is not None and op.name == "EXACT_SUM":
        if operation != "all_reduce":
            raise TypeError(f"{op} is for all_reduce, not for {operation}; each rank can take its part of the result")
        exact = functools.partial(exact_sum.all_reduce, nested_all_reduce)
        return Plan(call, handshake.without(exact)) if inner else plain(link, exact, call)
    largest = output if operation == "all_gather" else x
    if not type(x) is type(output) is np.ndarray:
        steps = _device_steps(operation, link, largest, op, algorithm, call)
        return _comparing(call, steps) if steps in device_table.SELF_COMPARING else Plan(call, steps)
    chosen = algorithm_of(operation, link, largest.nbytes, algorithm)
    if op is not None and op._merges and chosen not in _WITH_ALL_ROWS:
        chosen = "exchange"
    in_place = output is x
    places = (0, 0) if in_place else (0, 1)
    if chosen == "one_shot":
        shots = one_shot.SHOTS[operation](link, output, x, op, root)
        overlaps = not in_place and 2 * x.nbytes > link[EagerBuffers].buffer_bytes
        shot = OneShot(link, call, shots, places, one_shot.apart if overlaps else None, x.nbytes)
        return Plan(call, shot.steps, shot.run)
    if chosen == "two_shot" and link.find(EagerBuffers) is not None:
        pieces = None
        most_bytes = _PIECES_BYTES if link.size <= 4 else _PIECES_OF_MANY_BYTES
        if op is not None and op.factor is not None:
            most_bytes = min(most_bytes, _SCALED_PIECES_BYTES)
        if x.nbytes <= most_bytes and (algorithm or overrides().get(operation)) is None:
            pieces = OneShot(link, call, one_shot.SHOTS[operation](link, output, x, op, root), places)
        direct = Direct(link, call, operation, x, op, root, pieces)
        shot = OneShot(link, call, direct.shots(), places, None if in_place else direct.apart, x.nbytes)
        return Plan(call, shot.steps, shot.run)
    if chosen == "short" and not inner:
        return _comparing(call, getattr(short, operation))
    return _by_name(operation, chosen, link, largest, op, call, inner=inner)


def barrier(link: Link, name: str = "barrier") -> Plan:
    call = make_call(link, name)
    eager = link.find(EagerBuffers)
    if eager is not None:
        shot = OneShot(link, call, [one_shot.meeting(eager)])
        return Plan(call, shot.steps, shot.run)
    published = link.find(Calls)
    if link.one_node and published is not None and published.ordered and settings.eager():
        return Plan(call, functools.partial(_barrier_in_records, published))
    if link.one_node:
        return Plan(call, lambda link, call, _: native.barrier(link))
    return _comparing(call, lambda link, call, _: handshake.compare(link, call))


def _barrier_in_records(published: Calls, link: Link, call: Call, _: None) -> Steps:
    """Wait until all ranks of the node have published this call.

    With many ranks to a core this takes far less time than messages.
    """
    yield SpinWait(functools.partial(published.made_by_all, link.sequence), link.later)


def nested_all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    """Return the steps of an all_reduce that is a part of another operation."""
    plans = link.resource(Plans)
    key = ("inner", op, x.dtype, x.shape, type(x))
    plan = plans.get(key) or plans.remember(key, make(link, "all_reduce", None, x, x, op, inner=True))
    return plan.steps(link, plan.call, x, op)


def plain(link: Link, algorithm: Callable[..., Steps], call: Call) -> Plan:
    """Return the plan of an algorithm, which between nodes follows a comparison of the call."""
    if link.one_node:
        return Plan(call, handshake.without(algorithm))
    return _comparing(call, handshake.before(algorithm))


def _comparing(call: Call, steps: Callable[..., Steps]) -> Plan:
    """Return the plan of steps that compare the call themselves."""
    call.record = call.record.marked()
    return Plan(call, steps)


def _by_name(
    operation: str, name: str, link: Link, x: Array, op: ReduceOp | None, call: Call, *, inner: bool = False
) -> Plan:
    """Return the plan of an algorithm for arrays of the host, of which ``x`` is the largest."""
    module = MODULES["native" if name in ("one_shot", "short") else name]
    if module is native and op is not None:
        module = fallback.choose(operation, link, x.dtype, op, x.nbytes)
    function = getattr(module, operation)
    if module in _SELF_COMPARING:
        return _comparing(call, function)
    return Plan(call, handshake.without(function)) if inner else plain(link, function, call)


def _device_steps(
    operation: str, link: Link, x: Array, op: ReduceOp | None, algorithm: str | None, call: Call
) -> Callable[..., Steps]:
    in_pairs = op is not None and op._merges is not None
    name = "exchange" if in_pairs else algorithm_of(operation, link, x.nbytes, algorithm)
    host = _by_name(operation, name, link, x, op, replace(call)).steps
    return device_table.choose(operation, link, x, op, host, algorithm or overrides().get(operation))


def moving(
    link: Link,
    name: str,
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    *,
    count: int = ANY_COUNT,
    root: int = NO_ROOT,
    layout: str = "",
    counts: tuple[list[int], list[int]] | None = None,
) -> Plan:
    """Return the plan of a call that only moves data.

    ``counts`` is for calls with one output and one input: the bytes from each rank, and the bytes to each rank.
    """
    call = make_call(link, name, inputs, outputs, count=count, root=root, layout=layout)
    operation = "all_gather_list" if name == "all_gather" else name
    algorithm, arrays = getattr(native, operation), (*outputs, *inputs)
    on_device = next((x for x in arrays if type(x) is not np.ndarray), None)
    if on_device is not None:
        host = plain(link, algorithm, replace(call)).steps
        steps = device_table.choose(operation, link, on_device, None, host, None)
    elif link.find(EagerBuffers) is not None:
        return _through_blocks(link, call, outputs, inputs, root, counts)
    elif name != "all_gather":  # these go by messages, whose sizes are checked before they are received
        steps = handshake.without(algorithm)
    elif short.fits(link, max(x.nbytes for x in arrays)):
        return _comparing(call, short.all_gather_list)
    else:
        return plain(link, algorithm, call)
    return Plan(call, steps if counts is None else lambda *args: steps(*args, *counts))


def _through_blocks(
    link: Link,
    call: Call,
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    root: int,
    counts: tuple[list[int], list[int]] | None,
) -> Plan:
    name = call.name
    cut_output: Cut | None = _as_list if name == "scatter" else None
    cut_input: Cut | None = _as_list if name in ("gather", "all_gather") else None
    equal = False
    if counts is not None:
        equal = all(len(set(each)) == 1 for each in counts)  # otherwise both arrays are cut as bytes
        cut_output, cut_input = cuts = [_cut(each, equal) for each in counts]
        outputs, inputs = (cut(*given) for cut, given in zip(cuts, (outputs, inputs), strict=True))
    blocks = Blocks(link, name, outputs, inputs, root, (cut_output, cut_input), equal=equal)
    longest = max(x.nbytes for x in (*outputs, *inputs))
    shot = OneShot(
        link, call, [blocks.shot()], (0, 1), blocks.apart if blocks.shown[ATTACH][0].offered else None, longest
    )
    return Plan(call, shot.steps, shot.run)


def _cut(counts: list[int], equal: bool) -> Cut:
    """Return a function that cuts an array into blocks of ``counts`` bytes."""
    if not equal:
        return functools.partial(native.cut, counts=counts)
    return lambda x: [*x.reshape(len(counts), x.size // len(counts))]


def _as_list(x: Array) -> list[Array]:
    return [x]


def offering(operation: str) -> list[str]:
    return ["one_shot", *(name for name, module in MODULES.items() if hasattr(module, operation))]


def _checked(operation: str, name: str) -> str:
    on_device = list(device_table.ALGORITHMS) if operation == "all_reduce" else []
    if operation not in ONE_NODE or name not in offering(operation) + on_device:
        known = ", ".join(f"{each}:{'|'.join(offering(each))}" for each in ONE_NODE)
        known += f", and on CuPy arrays all_reduce:{'|'.join(device_table.ALGORITHMS)}"
        raise ValueError(
            f"there is no algorithm {operation}:{name}; MPIDDP_ALGORITHM and the argument algorithm may choose {known}"
        )
    return name


@functools.cache
def overrides() -> dict[str, str]:
    """Return the algorithms of ``MPIDDP_ALGORITHM``."""
    try:
        return {operation: _checked(operation, name) for operation, name in settings.algorithms().items()}
    except ValueError as error:
        raise settings.SettingError(str(error)) from None


def rows(operation: str, link: Link, algorithm: str | None = None) -> Rows:
    """Return the rows of an operation in this group: the table's, or one row with the algorithm that was asked for."""
    chosen = overrides().get(operation) if algorithm is None else _checked(operation, algorithm)
    if link.size == 1:
        return ((ANY_SIZE, "native"),)
    if chosen is None or chosen in device_table.ALGORITHMS:
        table = SEVERAL_NODES | (ONE_ORDER if settings.deterministic() else {})
        if link.one_node:
            table = CROWDED if link.world.crowded or link.find(EagerBuffers) is None else ONE_NODE
        return tuple((limit, _available(name, link)) for limit, name in table[operation])
    if chosen in _IN_MEMORY and not link.one_node:
        raise ValueError(f"{operation}:{chosen} works in the memory of one node, and {link} is on several")
    return ((ANY_SIZE, _available(chosen, link)),)


def _available(name: str, link: Link) -> str:
    if name == "short":
        return name if short.fits(link) else "native"
    return "native" if name == "one_shot" and link.find(EagerBuffers) is None else name


def algorithm_of(operation: str, link: Link, size_bytes: int, algorithm: str | None = None) -> str:
    return next(name for limit, name in rows(operation, link, algorithm) if size_bytes <= limit)

"""Which algorithm runs when: the one place that decides.

Every rank decides alike, because all that is looked at here (operation, dtype, reduction, bytes, nodes of the group) is
alike. Whether an array is symmetric is not: one rank may give an ordinary array where another gives a symmetric one. So
the algorithms that work in shared memory decide about that themselves, when they have heard of all ranks' arrays.

In the table "native" means MPI's own algorithm, or for reductions that MPI does not define, and for all of them under
``MPIDDP_DETERMINISTIC=1``, those of `fallback`. A call's argument ``algorithm="ring"`` goes before
``MPIDDP_ALGORITHM=all_reduce:ring``, which goes before the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from mpiddp import settings
from mpiddp.faults import calls
from mpiddp.mpi.link import Link
from mpiddp.mpi.reduction import ReduceOp, check
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

from . import (
    exchange,
    fallback,
    hierarchical,
    native,
    one_shot,
    ring,
    tree,
    two_shot,
)
from .gpu import table as device_table

Rows: TypeAlias = tuple[tuple[float, str], ...]
"""Algorithms for growing arrays, each with the number of bytes up to which it is the best."""

ALGORITHMS: dict[str, ModuleType] = {
    "native": native,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "hierarchical": hierarchical,
    "exchange": exchange,
    "ring": ring,
    "tree": tree,
}
"""All algorithms by name; each has a function for every operation that it is good for."""

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ANY_SIZE = float("inf")
_KIB = 1 << 10

# Measured on 2 and 4 ranks on 2 cores, MPICH 5.0 and Open MPI 5.0; `python -m mpiddp bench tune` compares. Bytes are
# those of the largest array of the call: the output of an all-gather, the input of a reduce-scatter.
ONE_NODE: dict[str, Rows] = {
    "all_reduce": ((128 * _KIB, "one_shot"), (ANY_SIZE, "two_shot")),
    "reduce": ((128 * _KIB, "one_shot"), (ANY_SIZE, "two_shot")),
    "reduce_scatter": ((128 * _KIB, "one_shot"), (256 * _KIB, "native"), (ANY_SIZE, "two_shot")),
    "all_gather": ((256 * _KIB, "one_shot"), (ANY_SIZE, "two_shot")),
    "broadcast": ((64 * _KIB, "one_shot"), (512 * _KIB, "native"), (ANY_SIZE, "two_shot")),
}
TWO_RANKS: dict[str, Rows] = {
    "broadcast": ((16 * _KIB, "one_shot"), (512 * _KIB, "native"), (ANY_SIZE, "two_shot")),
}
"""What goes before `ONE_NODE` in groups of two ranks; on four, MPI's own is slower from the start."""
FEW_RANKS = 8
"""In groups of more, nothing goes in one shot by default: each rank reads all others' arrays."""
SEVERAL_NODES: dict[str, Rows] = {
    "all_reduce": ((64 * _KIB, "native"), (ANY_SIZE, "hierarchical")),
    "reduce": ((ANY_SIZE, "native"),),
    "reduce_scatter": ((ANY_SIZE, "native"),),
    "all_gather": ((ANY_SIZE, "native"),),
    "broadcast": ((ANY_SIZE, "native"),),
}


def offering(operation: str) -> list[str]:
    """Return the names of the algorithms that can do ``operation``."""
    return [name for name, module in ALGORITHMS.items() if hasattr(module, operation)]


def _checked(operation: str, name: str) -> str:
    """Return the name of an algorithm that was asked for, if it can do ``operation``."""
    on_device = list(device_table.ALGORITHMS) if operation == "all_reduce" else []
    if operation not in ONE_NODE or name not in offering(operation) + on_device:
        known = ", ".join(f"{each}:{'|'.join(offering(each))}" for each in ONE_NODE)
        known += f", and on CuPy arrays all_reduce:{'|'.join(device_table.ALGORITHMS)}"
        raise ValueError(
            f"there is no algorithm {operation}:{name}; MPIDDP_ALGORITHM and the argument algorithm may choose {known}"
        )
    return name


def called(operation: str, asked: str | None) -> str:
    """Return what a call is called on which somebody may have asked for an algorithm: ranks must ask for the same."""
    return operation if asked is None else f"{operation} by {asked}"


def operation_of(name: str) -> str:
    """Return which operation is `called` so."""
    return name.partition(" by ")[0]


for _operation in (*ONE_NODE, "all_gather_single", "reduce_scatter_single"):
    for _name in (*ALGORITHMS, *device_table.ALGORITHMS):
        calls.kind(called(_operation, _name))  # so that ranks which did not ask can name what others asked for


@functools.cache
def _overrides() -> dict[str, str]:
    return {operation: _checked(operation, name) for operation, name in settings.algorithms().items()}


def _names(operation: str, link: Link, asked: str | None = None) -> Rows:
    """Return what the table, or what overrides it, says for a group."""
    chosen = _overrides().get(operation) if asked is None else _checked(operation, asked)
    if link.size == 1:
        return ((ANY_SIZE, "native"),)
    if chosen is None or chosen in device_table.ALGORITHMS:
        return tuple((limit, _possible(name, link)) for limit, name in _rows(operation, link.nodes))
    if chosen in _IN_MEMORY and not link.one_node:
        raise ValueError(f"{operation}:{chosen} works in the memory of one node, and {link} is on several")
    return ((ANY_SIZE, _possible(chosen, link)),)


_IN_MEMORY = ("one_shot", "two_shot")


def _possible(name: str, link: Link) -> str:
    """Return the name of an algorithm of the table, or what takes its place where there is no memory for it."""
    return _by_messages(name) if link.slots is None else name


def _by_messages(name: str) -> str:
    return "native" if name == "one_shot" else name


def name_of(operation: str, link: Link, size_bytes: int) -> str:
    """Return the name of the algorithm that ``operation`` on arrays of ``size_bytes`` runs in a group."""
    return next(name for limit, name in _names(operation, link) if size_bytes <= limit)


def table_of(link: Link) -> dict[str, Rows]:
    """Return the rows by which a group chooses, by operation."""
    return {operation: _names(operation, link) for operation in ONE_NODE}


@functools.cache
def _rows(operation: str, nodes: tuple[int, ...]) -> Rows:
    """Return the rows for a group with these nodes."""
    if len(set(nodes)) > 1:
        return SEVERAL_NODES[operation]
    if len(nodes) > FEW_RANKS:
        return tuple((limit, _by_messages(name)) for limit, name in ONE_NODE[operation])
    return (ONE_NODE | TWO_RANKS if len(nodes) == 2 else ONE_NODE)[operation]


Plan = list[tuple[float, Callable[..., Steps]]]
_Key = tuple[int, str, "np.dtype[Any]", ReduceOp | None, type, str | None]
_plans: dict[_Key, Plan] = {}
_MOST_PLANS = 4096
epoch = 0
"""Changes when the choices do: for those who remember what they led to."""


def choose(
    operation: str, link: Link, x: Array, op: ReduceOp | None = None, asked: str | None = None
) -> Callable[..., Steps]:
    """Return the steps of ``operation`` for arrays like ``x``, which is the largest of the call.

    Parameters
    ----------
    asked : str, optional
        The name of an algorithm that goes before all tables.

    Raises
    ------
    TypeError
        If ``op`` means nothing on the dtype of ``x``.
    ValueError
        If no algorithm of the name that was asked for does ``operation``, or not in this group.
    """
    size_bytes = x.nbytes
    key = (link.id, operation, x.dtype, op, type(x), asked)
    for limit, steps in _plans.get(key) or _plan(key, link):
        if size_bytes <= limit:
            return steps
    raise AssertionError("the last row is for any size")


def _plan(key: _Key, link: Link) -> Plan:
    """Return, and remember, the table's rows for a group, a dtype and a reduction, with the functions they name."""
    _, operation, dtype, op, kind, asked = key
    if operation in _REDUCING:
        check(dtype, op)  # also refuses None, as all that is no ReduceOp
    plan: Plan = []
    for limit, name in _names(operation, link, asked):
        if op is not None and name == "native":
            plan += [(min(end, limit), steps) for end, steps in fallback.by_size(operation, link, dtype, op)]
        else:
            plan.append((limit, getattr(ALGORITHMS[name], operation)))
    if kind is not np.ndarray:
        plan = device_table.plan(operation, link, dtype, op, plan, asked or _overrides().get(operation))
    if len(_plans) >= _MOST_PLANS:  # groups come and go
        _plans.clear()
    _plans[key] = plan
    return plan


def moving(operation: str, link: Link, *arrays: Array) -> Callable[..., Steps]:
    """Return the steps of an operation that only moves data between ``arrays``, for which there is no table."""
    steps: Callable[..., Steps] = getattr(native, operation)
    for x in arrays:
        if type(x) is not np.ndarray:
            key = (link.id, operation, x.dtype, None, type(x), None)
            if key not in _plans:
                _plans[key] = device_table.plan(operation, link, x.dtype, None, [(ANY_SIZE, steps)], None)
            return _plans[key][0][1]
    return steps


def is_for_devices(algorithm: Callable[..., Steps]) -> bool:
    """Tell whether steps are for arrays of a device: what such ranks send does not meet what others do."""
    return getattr(algorithm, "func", algorithm).__module__ in device_table.MODULES


def forget() -> None:
    """Forget what was chosen, because settings may have changed."""
    global epoch
    epoch += 1
    _plans.clear()
    _overrides.cache_clear()
    fallback.forget()
    _overrides()

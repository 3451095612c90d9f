"""What the last bits of results depend on besides a `Trainer`'s state: noted in checkpoints, installed, compared."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.algorithms import plan
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI

_ANY_SIZE = None
"""In JSON, which does not know infinity."""


def what_decides_bits() -> dict[str, Any]:
    """Return what the last bits depend on, as JSON knows it.

    ``algorithms`` is the table of the group of all ranks: for each operation, which algorithm up to how many bytes.
    """
    link = default_group().link
    rows = {
        operation: [[_ANY_SIZE if limit == plan.ANY_SIZE else limit, name] for limit, name in each]
        for operation, each in plan.table_of(link).items()
    }
    return {
        "ranks": link.size,
        "nodes": list(link.nodes),
        "BLAS threads": settings.blas_threads(),
        "MPIDDP_DETERMINISTIC": settings.deterministic(),
        "NumPy": np.__version__,
        "MPI library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "machine": platform.machine(),
        "algorithms": rows,
    }


def install(then: Mapping[str, Any]) -> None:
    """Choose algorithms as a checkpoint's run did, where the ranks and their nodes are as many; every rank calls it.

    What ``MPIDDP_ALGORITHM`` asks for goes before.

    Parameters
    ----------
    then : mapping
        What `what_decides_bits` returned in that run.
    """
    link = default_group().link
    if "algorithms" in then and (then["ranks"], then["nodes"]) == (link.size, list(link.nodes)):
        rows = {
            operation: tuple((plan.ANY_SIZE if limit is _ANY_SIZE else limit, name) for limit, name in each)
            for operation, each in then["algorithms"].items()
        }
        plan.install(rows, link)


def differences(then: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is different now: a name, what it was, and what it is. Algorithms belong to their number of ranks."""
    then, now = (dict(each) for each in (then, what_decides_bits()))
    before, after = then.pop("algorithms", {}), now.pop("algorithms")
    if then["ranks"] != now["ranks"]:
        before = then["nodes"] = now["nodes"] = {}
    yield from ((name, then[name], now[name]) for name in now if name in then and then[name] != now[name])
    for operation, rows in before.items():
        if rows != after.get(operation):
            yield f"the algorithm of {operation}", rows, after.get(operation)

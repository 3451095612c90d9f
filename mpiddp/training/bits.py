"""The surroundings that decide the last bits of results besides a `Trainer`'s state: noted in checkpoints, compared."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI


def what_decides_bits() -> dict[str, Any]:
    """Return the surroundings of the last bits, as JSON knows them.

    The built-in table of algorithms is not among them: it depends on the nodes of the ranks only.
    """
    link = default_group().link
    asked = ",".join(f"{operation}:{name}" for operation, name in sorted(settings.algorithms().items()))
    return {
        "ranks": link.size,
        "nodes": list(link.nodes),
        "BLAS threads": settings.blas_threads(),
        "MPIDDP_DETERMINISTIC": settings.deterministic(),
        "MPIDDP_ALGORITHM": asked or None,
        "NumPy": np.__version__,
        "MPI library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "machine": platform.machine(),
    }


def differences(then: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is different now: a name, its value then, and its value now.

    Parameters
    ----------
    then : mapping
        The result of `what_decides_bits` in another run. Checkpoints of earlier versions hold a table of algorithms,
        which cannot be followed any more.
    """
    now = what_decides_bits()
    same_ranks = then["ranks"] == now["ranks"]
    for name, value in now.items():
        if name in then and then[name] != value and (same_ranks or name != "nodes"):
            yield name, then[name], value
    if "algorithms" in then and same_ranks:
        yield "the table of algorithms", "the checkpoint's own", "the built-in one"

"""What decides the last bits of a run's results, besides the trainer's state: checkpoints keep it."""

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.cores import blas_threads
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI


def current() -> dict[str, Any]:
    """Return what the bits of a result depend on. The table of algorithms is left out: it depends on the nodes only."""
    link = default_group()._link
    asked = ",".join(f"{operation}:{name}" for operation, name in sorted(settings.algorithms().items()))
    return {
        "ranks": link.size,
        "nodes": list(link.nodes),
        "BLAS threads": blas_threads(),
        "MPIDDP_DETERMINISTIC": settings.deterministic(),
        "MPIDDP_ALGORITHM": asked or None,
        "NumPy": np.__version__,
        "MPI library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "machine": platform.machine(),
    }


def differences(then: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value then and value now."""
    now = current()
    same_ranks = then["ranks"] == now["ranks"]
    for name, value in now.items():
        if name in then and then[name] != value and (same_ranks or name != "nodes"):
            yield name, then[name], value

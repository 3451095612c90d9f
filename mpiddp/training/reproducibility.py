"""The facts that decide the last bits of a run's results besides the trainer's state. Checkpoints record them."""

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.cores import blas_threads
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI


def current() -> dict[str, Any]:
    """Return the facts that the bits of a result depend on.

    The built-in choice of algorithms is left out, because the ranks and nodes determine it.
    """
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
    """Yield name, recorded value and current value of each fact that differs from those in ``then``.

    If the number of ranks differs, the nodes differ anyway and are not yielded.
    """
    now = current()
    same_ranks = then["ranks"] == now["ranks"]
    for name, value in now.items():
        if name in then and then[name] != value and (same_ranks or name != "nodes"):
            yield name, then[name], value

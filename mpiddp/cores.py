"""Cores of this process, and the BLAS threads that share them. Imports the standard library only."""

import os

from .launchers import integer, launch, local_ranks

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""They bound the threads of the BLAS libraries, which read them when NumPy is imported, never later."""


def cores(pid: int = 0) -> set[int]:
    return os.sched_getaffinity(pid)


def core_mask() -> int:
    """Return the cores of this process as the bits of an integer."""
    return sum(1 << core for core in cores())


def available_cores() -> int:
    return len(cores())


def blas_threads() -> int | None:
    found = [value for value in (integer(name) for name in THREAD_VARIABLES) if value is not None]
    return min(found) if found else None


def _launcher_cores() -> int:
    """Return the cores of the parent, the launcher's daemon: all ranks of the node share them."""
    count = len(cores(os.getppid()))
    return min(count, integer("SLURM_CPUS_ON_NODE") or count)


def _share_of_cores() -> int:
    found = launch()
    local_size = 1 if found is None else local_ranks() or found.size
    return max(1, min(available_cores(), _launcher_cores() // local_size)) if local_size > 1 else available_cores()


def limit_blas_threads(threads: int | None = None) -> int | None:
    """Bound this rank's BLAS threads by ``threads``, else its share of the node's cores, before NumPy is imported.

    Return the number, or None if the environment bounds them. The share is the affinity mask's cores, at most the
    node's cores over its ranks: a mask of this rank alone is used in full, a common one is divided.
    """
    if blas_threads() is not None:
        return None
    threads = threads or _share_of_cores()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return threads

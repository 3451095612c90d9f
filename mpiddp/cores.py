"""Cores of this process, and the BLAS threads that share them. The module imports the standard library only."""

import os

from .launchers import integer, launch, local_ranks

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that limit the threads of BLAS libraries. The libraries read them only when NumPy is imported."""


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
    """Return the number of cores that the node's ranks share.

    They are the cores of the parent process, the launcher's daemon, but at most as many as Slurm has given to the job.
    """
    count = len(cores(os.getppid()))
    return min(count, integer("SLURM_CPUS_ON_NODE") or count)


def _share_of_cores() -> int:
    found = launch()
    local_size = 1 if found is None else local_ranks() or found.size
    return max(1, min(available_cores(), _launcher_cores() // local_size)) if local_size > 1 else available_cores()


def limit_blas_threads(threads: int | None = None) -> int | None:
    """Limit BLAS threads to ``threads``, by default this rank's share of the node's cores, before NumPy is imported.

    Return the number, or None if the environment limits the threads already. The share is the number of cores in the
    rank's affinity mask, but at most the node's cores divided by its ranks. So a rank that has a mask of its own uses
    all cores in it, and ranks with a common mask divide its cores.
    """
    if blas_threads() is not None:
        return None
    threads = threads or _share_of_cores()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return threads

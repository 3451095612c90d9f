"""The job that a benchmark runs in: its group, its arrays, and what to say about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp.distributed as dist
from mpiddp import settings
from mpiddp.device.allocator import tune_allocator
from mpiddp.faults import monitor
from mpiddp.mpi.world import library_name
from mpiddp.training.config import UsageError
from mpiddp.typing import Array

from . import load
from .buffers import Allocate
from .timing import Clock


class Job:
    """What all benchmarks share; made by `job`.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    comm : MPI.Intracomm
        A communicator of all ranks, for plain MPI.
    clock : Clock
        Measures calls.
    """

    def __init__(self) -> None:
        self.world = monitor.start().world
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.comm = self.world.comm.Dup()
        self.clock = Clock(self.world.comm.Dup())

    def close(self) -> None:
        """Free the communicators."""
        self.comm.Free()
        self.clock.close()

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, number: int) -> int:
        """Return the sum over ranks."""
        return int(self.comm.allreduce(number))

    def together(self, action: Callable[[], Any]) -> None:
        """Do something on rank 0 that the user may have asked for in vain; all ranks hear of it."""
        fault = None
        if self.rank == 0:
            try:
                action()
            except UsageError as error:
                fault = str(error)
        fault = self.comm.bcast(fault)
        if fault:
            raise UsageError(fault)

    def environment(self) -> dict[str, Any]:
        """Return what one has to know in order to compare with another machine."""
        cores = self.comm.allgather(settings.core_mask())
        return {
            "mpi": library_name(),
            "mpi4py": importlib.metadata.version("mpi4py"),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "ranks": self.size,
            "nodes": [self.world.nodes.count(node) for node in sorted(set(self.world.nodes))],
            "host": self.world.hosts[0],
            "processor": _processor(),
            "cores": int(np.bitwise_or.reduce(np.array(cores, object))).bit_count(),
            "command": " ".join(sys.argv),
        }


def header(environment: dict[str, Any]) -> str:
    """Return the environment as the comment lines above a table."""
    nodes = environment["nodes"]
    where = (
        f"{environment['ranks']} rank{'s' * (environment['ranks'] > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    )
    return (
        f"# {where} ({environment['host']}, {environment['processor']}, {environment['cores']} cores),"
        f" {environment['mpi']}, mpi4py {environment['mpi4py']}, NumPy {environment['numpy']}"
    )


def _processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def job() -> Iterator[Job]:
    """Begin a benchmark and end it: MPI, the process group, an allocator that keeps its pages."""
    tune_allocator()
    began = not dist.is_initialized()
    if began:
        dist.init_process_group()
    made = Job()
    # Averages of what rests at zero, sums beyond the range of small integers: nothing to be warned of here.
    with np.errstate(all="ignore"):
        yield made
    made.close()
    if began:
        dist.destroy_process_group()


def dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that the command line calls ``name``."""
    if name == "bfloat16":
        try:
            bfloat16: np.dtype[Any] = np.dtype(load("ml_dtypes").bfloat16)
        except ImportError:
            raise UsageError("--dtype bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        return bfloat16
    return np.dtype(name)


def ordinary(count: int, kind: np.dtype[Any]) -> Array:
    """Return ordinary memory."""
    return np.empty(count, kind)


def symmetric(largest_bytes: int) -> Allocate:
    """Return what makes symmetric arrays, out of two that are allocated once: views of them are symmetric, too.

    Parameters
    ----------
    largest_bytes : int
        Of an array that will be asked for; all ranks call with the same.
    """
    halves: list[Array] = [dist.symmetric_empty(largest_bytes, np.uint8) for _ in range(2)]  # type: ignore[misc]

    def allocate(count: int, kind: np.dtype[Any]) -> Array:
        halves.reverse()  # an operation has two arrays at most
        return halves[0][: count * kind.itemsize].view(kind)

    return allocate

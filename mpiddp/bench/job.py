"""The job of a benchmark: its communicators, the description of its machine, and its result file."""

import argparse
import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp
import mpiddp.distributed as dist
from mpiddp.cores import cores
from mpiddp.device.allocator import tune_allocator
from mpiddp.device.half import bfloat16
from mpiddp.faults import this_job
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.world import library_name
from mpiddp.training.info import collect
from mpiddp.training.options import refusing
from mpiddp.training.ranks import of_any_rank, raise_on_all_ranks

from . import results
from .timing import Clock


class Bench:
    """The job of a benchmark, as seen by one of its ranks. Calls of plain MPI use the communicator ``comm``.

    The list ``rows`` is for the result file.
    """

    def __init__(self) -> None:
        self.world = this_job.start().world
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.comm = self.world.comm.Dup()
        self.clock = Clock(self.world.comm.Dup())
        self.rows: list[Any] = []

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def describe(self) -> list[str]:
        """Print the environment on rank 0, and return its lines. All ranks call this together."""
        nodes, all_cores = len(set(self.world.nodes)), set[int]().union(*self.comm.allgather(cores()))
        where = f"{self.size} rank{'s' * (self.size > 1)} on {nodes} node{'s' * (nodes > 1)}"
        described = [
            f"{where} ({self.world.hosts[0]}, {_processor()}, {len(all_cores)} cores), {library_name()}, mpi4py"
            f" {importlib.metadata.version('mpi4py')}, NumPy {np.__version__}",
            *_mpi_build(),
            *_mpi_settings(),
        ]
        self.say("\n".join(f"# {line}" for line in described))
        return described

    def torch(self) -> Any:
        """Return a `with_torch.Torchs`. If a rank has no torch, print that and return None. All ranks call this."""
        fault = None
        try:
            from . import with_torch
        except ImportError as error:
            fault = str(error)
        fault = of_any_rank(fault)
        if fault is None:
            return with_torch.Torchs(self.world)
        self.say(f"# torch is left out: {fault}; pip install torch")
        return None


def _mpi_build() -> list[str]:
    lines = [" ".join(line.split()) for line in MPI.Get_library_version().splitlines()]
    return lines[:1] + [line for line in lines if line.startswith("MPICH Device")]


def _mpi_settings() -> list[str]:
    prefixes = ("MPIR_CVAR_", "OMPI_MCA_coll", "OMPI_MCA_pml", "OMPI_MCA_btl", "UCX_TLS", "MPI4PY_RC_THREAD")
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def job(arguments: argparse.Namespace | None = None) -> Iterator[Bench]:
    """Start the job of a benchmark: tune the allocator, so that it keeps its pages, and initialise the process group.

    If the program has initialised the group already, it also has to destroy it. With the ``arguments`` of a command,
    the job prints the environment first, and rank 0 writes the rows at the end if ``--json`` is given. If that fails,
    all ranks raise the UsageError.
    """
    tune_allocator()
    began = not dist.is_initialized()
    if began:
        dist.init_process_group()
    made = Bench()
    described = [] if arguments is None else made.describe()
    # Values do not matter while times are measured, so NumPy need not warn of overflow or invalid values.
    with np.errstate(all="ignore"):
        yield made
    if arguments is not None and arguments.json is not None:
        environment = collect(mpiddp.__version__) | {"described": described}
        what = arguments.json, arguments.module, environment, made.rows
        raise_on_all_ranks(lambda: results.write(*what) if made.rank == 0 else None)
    made.comm.Free()
    made.clock.close()
    if began:
        dist.destroy_process_group()


def dtype(name: str) -> np.dtype[Any]:
    with refusing(f"--dtype {name}: ", TypeError):
        return bfloat16() if name == "bfloat16" else np.dtype(name)

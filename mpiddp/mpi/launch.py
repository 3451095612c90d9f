"""Whether the job was started in a way that can work: what launcher, environment, arguments and MPI say must agree."""

from __future__ import annotations

import sys
from pathlib import Path

from mpiddp import settings

from .lazy import MPI, SetupError


def check_launcher() -> None:
    """Refuse a job whose launcher announced several ranks of which each sees a world of its own.

    Raises
    ------
    SetupError
        With the cure.
    """
    found = settings.launch()
    if found is None or found.size == 1 or MPI.COMM_WORLD.size > 1:
        return
    cure = (
        "start with the plugin of your MPI library, `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH), out of"
        " those that `srun --mpi=list` shows"
        if found.launcher == "srun"
        else "start with the mpirun that belongs to this library"
    )
    raise SetupError(
        f"{found.launcher} started {found.size} ranks, but each sees a world of its own: this process runs on"
        f" {library_name()} ({MPI.__file__}), which does not understand that launcher; {cure}"
    )


def library_name() -> str:
    """Return the name and version of the MPI library, e.g. ``MPICH 5.0.2``."""
    first_line = MPI.Get_library_version().split("\n")[0]
    return " ".join(first_line.split(",")[0].replace("Version:", "").split())


def check_claims(comm: MPI.Intracomm, rank: int, world_size: int) -> None:
    """Refuse what contradicts MPI among the arguments of ``init_process_group`` (-1: none) and the environment.

    Collective over ``comm``, which has all ranks: a contradiction on one is an error on all.

    Raises
    ------
    SetupError
        With the cure.
    """
    # So nobody waits for one that gave up.
    faults = [text for text in comm.allgather(_contradiction(comm, rank, world_size)) if text]
    if faults:
        raise SetupError(faults[0])


def _contradiction(comm: MPI.Intracomm, rank: int, world_size: int) -> str | None:
    announced = settings.rank_variables()
    for name, value, true in (
        ("world_size", world_size, comm.size),
        ("rank", rank, comm.rank),
        ("WORLD_SIZE", announced.get("WORLD_SIZE", -1), comm.size),
        ("RANK", announced.get("RANK", -1), comm.rank),
    ):
        if value in (-1, true):
            continue
        where = "in the environment" if name.isupper() else "given to init_process_group"
        if comm.size > 1:
            actual = f"this is rank {comm.rank} of MPI's {comm.size}"
            cure = "leave it away" if name.islower() else f"delete what sets {name}, it is filled in here"
        else:
            ranks = max(world_size, announced.get("WORLD_SIZE", -1), 2)
            actual = "MPI's world has 1 rank"
            cure = (
                f"start with `mpirun -np {ranks} python {Path(sys.argv[0]).name or 'run.py'}` and delete the spawn"
                " (mp.spawn, torchrun) or what else sets it"
            )
        return f"{name}={value} {where}, but {actual}; ranks come from MPI: {cure}"
    return None

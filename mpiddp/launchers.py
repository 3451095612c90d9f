"""Launchers of MPI jobs: facts about them, and the ranks that they announce to a process.

The module imports the standard library only.
"""

import os
from typing import NamedTuple


class Launcher(NamedTuple):
    """Facts about a launcher.

    ``rank``, ``size``, ``local_rank`` and ``local_size`` are the environment variables in which the launcher announces
    a process's rank, the number of ranks, and both of these numbers for the node alone.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    ends_libraries: tuple[str, ...] = ()
    """MPI libraries that abort in MPI_Init under this launcher, mostly without a message."""
    ends_with_a_rank: bool = True
    """True if a rank that exits with an error before MPI has started ends the job; else only a killed rank does."""
    passes_interrupts: bool = True
    """True if ranks get SIGINT on Ctrl-C; otherwise they get SIGCONT and SIGTERM, and their output is lost."""
    waits_for_lost_hosts: bool = False
    """True if the launcher waits for ever for its daemon on a host that is out of reach, even after an abort."""
    cure: str = "start with the mpirun that belongs to this library"
    """Advice for a user whose MPI library does not understand this launcher."""


# The order matters: an mpirun inside a batch job inherits Slurm's variables, which then describe the node's daemon.
_LAUNCHERS = (
    Launcher(
        "mpirun (Open MPI)",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ends_libraries=("MPICH",),
        passes_interrupts=False,
        waits_for_lost_hosts=True,
    ),
    Launcher(
        "mpiexec (PALS)",
        *("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ),
    Launcher(
        "mpirun (MPICH, Hydra)",
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ends_with_a_rank=False,
    ),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher(
        "srun",
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        cure=(
            "start with the plugin of your MPI library, `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH), out"
            " of those that `srun --mpi=list` shows"
        ),
    ),
)
_HYDRA, _SRUN = _LAUNCHERS[2], _LAUNCHERS[4]


class Launch(NamedTuple):
    """The numbers that a launcher announces to a process, which are known before MPI runs."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None


def integer(name: str) -> int | None:
    """Return an environment variable as a number, or None."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def launch() -> Launch | None:
    """Return the launcher's announcement, or None if no launcher has started this process."""
    for launcher in _LAUNCHERS:
        rank, size, local_rank = integer(launcher.rank), integer(launcher.size), integer(launcher.local_rank)
        if rank is None or size is None:
            continue
        if local_rank is None and integer(_SRUN.rank) == rank:
            local_rank = integer(_SRUN.local_rank)  # srun --mpi=pmi2 sets PMI_RANK but no local rank
        if launcher is _HYDRA and _SRUN.size in os.environ and launcher.local_rank not in os.environ:
            launcher = _SRUN
        return Launch(launcher, rank, size, local_rank)
    return None


def local_ranks() -> int | None:
    """Return the number of the job's ranks on this node, or None if the launcher does not announce it."""
    announced = (integer(launcher.local_size) for launcher in _LAUNCHERS)
    ranks_here = os.environ.get("SLURM_GTIDS", "")  # the ranks on this node, such as 4,5,6
    found = next((each for each in announced if each is not None), None)
    return len(ranks_here.split(",")) if found is None and ranks_here else found


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def announce_ranks() -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK, where unset, from the launcher. Scripts read them on their first line."""
    found = launch()
    if found is not None:
        for name, value in zip(RANKS, (found.rank, found.size, found.local_rank), strict=True):
            if value is not None:
                os.environ.setdefault(name, str(value))


def rank_variables() -> dict[str, int]:
    """Return RANK, WORLD_SIZE and LOCAL_RANK, as far as they are integers."""
    found = {name: integer(name) for name in RANKS}
    return {name: value for name, value in found.items() if value is not None}


def correct_ranks(rank: int, world_size: int, local_rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))


def launcher_survives() -> bool:
    """Return True under ``mpirun --with-ft ulfm``, which lets the other ranks live on when one fails."""
    return integer("OMPI_MCA_mpi_ft_enable") == 1


_COMPONENTS = "OMPI_MCA_coll"
_WRONG_AFTER_DEATHS = ("han", "adapt")


def survives() -> bool:
    """Return True if ranks can go on when one fails.

    The launcher must let them, and components of Open MPI that would return wrong sums must be excluded.
    """
    components = os.environ.get(_COMPONENTS, "")
    excluded = components.removeprefix("^").split(",") if components.startswith("^") else []
    return launcher_survives() and all(each in excluded for each in _WRONG_AFTER_DEATHS)


def prepare_survival() -> None:
    """Exclude Open MPI's components "han" and "adapt" under ``--with-ft ulfm``, unless the user has chosen components.

    Their sums between nodes are wrong after a rank has failed (5.0.11).
    """
    if launcher_survives():
        os.environ.setdefault(_COMPONENTS, "^" + ",".join(_WRONG_AFTER_DEATHS))

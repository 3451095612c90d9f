"""Which process is a rank: the programs that a rank starts inherit its variables, and are none.

Imports the standard library only.
"""

import os
import re
import stat

from .launchers import integer, launch

# Prefixes of the variables that say which rank of which job a process is. Those of a Slurm allocation, rather than
# of a step in it, stay: they say where a new job may run.
_OF_A_JOB = (
    *("PMI_", "PMI2_", "HYDI_", "MPI_LOCAL", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "OMPI_COMM_WORLD_"),
    *("MV2_COMM_WORLD_", "PALS_", "FLUX_TASK_", "SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"),
)


def outside_of_jobs() -> dict[str, str]:
    """Return the environment for a job of its own within a rank: an outer Slurm allocation stays."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", RANK_PROCESS)
    left = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(_OF_A_JOB)}
    own, outer = MARKERS
    return {outer if name == own else name: value for name, value in left.items()}


MARKERS = "MPIDDP_MARKER", "MPIDDP_OUTER_MARKER"
"""The file by which `python -m mpiddp run` follows its job, and finds its processes; in a job within a rank."""

RANK_PROCESS = "MPIDDPRANK_PROCESS"
"""Left by a rank for the programs that it starts: its process id and its job's name."""

# A job within a Slurm step has the step's name, too.
_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "PALS_APID", "FLUX_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def _job_names() -> tuple[str, str]:
    """Return the job's name, and the socket to the launcher, or ``""``.

    Hydra announces an mpirun inside a rank in the words of the outer one: only the socket differs. A program started by
    a rank has none, or the rank's own.
    """
    names = ",".join(os.environ.get(name, "") for name in _JOB_NAMES)
    try:
        found = os.fstat(integer("PMI_FD") or -1)
    except OSError:
        return names, ""
    return names, str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""


def claim_rank() -> None:
    """Mark this process, for the programs that it starts, as the announced rank."""
    if launch() is not None:
        os.environ[RANK_PROCESS] = " ".join([str(os.getpid()), *_job_names()])


def release_rank() -> None:
    """Take the mark back: the program that this process runs has not used MPI itself yet."""
    os.environ.pop(RANK_PROCESS, None)


def started_by_rank() -> int | None:
    """Return the process of the rank whose launcher's variables this process has inherited; None if they are its own.

    Not found: a program started by a rank that has not used MPI through mpiddp.
    """
    mark = re.fullmatch(r"(\d+) (.*) (\d*)", os.environ.get(RANK_PROCESS, ""))
    if launch() is None or mark is None:
        return None
    pid, names, socket = mark.groups()
    own_names, own_socket = _job_names()
    inherited = names == own_names and own_socket in ("", socket)
    return int(pid) if inherited and int(pid) != os.getpid() else None

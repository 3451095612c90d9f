"""The distinction between a rank and a program that a rank has started.

Such a program inherits the launcher's variables from the rank, but it is no rank of the job. The module imports the
standard library only.
"""

import os
import re
import stat

from .launchers import integer, launch

# Prefixes of the variables that say which rank of which job a process is. Variables of a Slurm step are among them.
# Variables of a Slurm allocation are not, because they say where a new job may run.
_OF_A_JOB = (
    *("PMI_", "PMI2_", "HYDI_", "MPI_LOCAL", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "OMPI_COMM_WORLD_"),
    *("MV2_COMM_WORLD_", "PALS_", "FLUX_TASK_", "SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"),
)


def outside_of_jobs() -> dict[str, str]:
    """Return the environment in which a rank can start another job. Variables of a Slurm allocation stay in it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", RANK_PROCESS)
    left = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(_OF_A_JOB)}
    own, outer = MARKERS
    return {outer if name == own else name: value for name, value in left.items()}


MARKERS = "MPIDDP_MARKER", "MPIDDP_OUTER_MARKER"
"""Variables with the path of the file by which `python -m mpiddp run` follows a job and finds its processes.

The first is for the job itself. In another job that a rank starts, the second has the file of the outer job.
"""

RANK_PROCESS = "MPIDDPRANK_PROCESS"
"""Variable that a rank sets for the programs that it starts. It has the rank's process id and the name of its job."""

# Variables that together name a job. A job within a Slurm step has the variables of the step as well.
_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "PALS_APID", "FLUX_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def _job_names() -> tuple[str, str]:
    """Return the name of the job, and the inode of the socket to the launcher, or ``""`` without a socket.

    If a rank runs mpirun itself, Hydra sets the same variables for the inner job as for the outer job, and only the
    socket differs. A program that a rank starts has no socket, or inherits the socket of the rank.
    """
    names = ",".join(os.environ.get(name, "") for name in _JOB_NAMES)
    try:
        found = os.fstat(integer("PMI_FD") or -1)
    except OSError:
        return names, ""
    return names, str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""


def claim_rank() -> None:
    """Mark this process as the announced rank, so that the programs that it starts know that they are no ranks."""
    if launch() is not None:
        os.environ[RANK_PROCESS] = " ".join([str(os.getpid()), *_job_names()])


def release_rank() -> None:
    """Remove the mark of `claim_rank`, before this process runs a program that is itself to become the rank."""
    os.environ.pop(RANK_PROCESS, None)


def started_by_rank() -> int | None:
    """Return the process id of the rank from which this process has inherited the launcher's variables.

    The result is None if the variables are this process's own. It is also None, wrongly, for a program of a rank that
    has not used MPI through mpiddp.
    """
    mark = re.fullmatch(r"(\d+) (.*) (\d*)", os.environ.get(RANK_PROCESS, ""))
    if launch() is None or mark is None:
        return None
    pid, names, socket = mark.groups()
    own_names, own_socket = _job_names()
    inherited = names == own_names and own_socket in ("", socket)
    return int(pid) if inherited and int(pid) != os.getpid() else None

"""Environment variables: mpiddp's own and the launchers'. Imports the standard library only.

mpiddp's own are read here alone, each on request, so that a test or a script may set it until then.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""They bound the threads of the BLAS libraries, which read them when NumPy is imported, never later."""


class SettingError(ValueError):
    """An environment variable means nothing; the text says what was expected."""


class Launch(NamedTuple):
    """A launcher's announcement to a process before MPI runs."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None


# Launcher, rank, size, local rank. The order matters: an mpirun inside a batch job inherits Slurm's variables, which
# then describe the node's daemon.
_LAUNCHERS = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    ("mpirun (MPICH, Hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def _integer(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def _switch(name: str) -> bool | None:
    """Return a variable of 0 or 1 as a bool, or None if it is unset."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise SettingError(f"{name} must be 0 or 1; got {text!r}")
    return None if text == "" else text == "1"


def _number(name: str, default: str) -> tuple[str, float]:
    """Return a variable's text and its number, or NaN."""
    text = os.environ.get(name, default)
    try:
        return text, float(text)
    except ValueError:
        return text, math.nan


def launch() -> Launch | None:
    """Return None for a process without a launcher."""
    for name, rank_variable, size_variable, local_variable in _LAUNCHERS:
        rank, size = _integer(rank_variable), _integer(size_variable)
        if rank is None or size is None:
            continue
        local_rank = _integer(local_variable)
        if local_rank is None and _integer("SLURM_PROCID") == rank:
            local_rank = _integer("SLURM_LOCALID")  # srun --mpi=pmi2 sets PMI_RANK but no local rank
        if "Hydra" in name and "SLURM_STEP_NUM_TASKS" in os.environ and local_variable not in os.environ:
            name = "srun"
        return Launch(name, rank, size, local_rank)
    return None


_LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def local_ranks() -> int | None:
    for name in _LOCAL_SIZES:
        found = _integer(name)
        if found is not None:
            return found
    return _slurm_tasks(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _integer("SLURM_NODEID") or 0)


def _slurm_tasks(text: str, node: int) -> int | None:
    """Return entry ``node`` of Slurm's list of tasks, e.g. ``8(x2),3``: 8, 8 and 3."""
    counts: list[int] = []
    for tasks, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeated or 1)
    return counts[node] if node < len(counts) else None


def announce_ranks() -> None:
    """Fill unset RANK, WORLD_SIZE and LOCAL_RANK from the launcher: scripts read them on their first line."""
    found = launch()
    if found is not None:
        os.environ.setdefault("RANK", str(found.rank))
        os.environ.setdefault("WORLD_SIZE", str(found.size))
        if found.local_rank is not None:
            os.environ.setdefault("LOCAL_RANK", str(found.local_rank))


def rank_variables() -> dict[str, int]:
    """Return those that are integers."""
    found = {name: _integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {name: value for name, value in found.items() if value is not None}


def correct_ranks(rank: int, world_size: int, local_rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))


# Prefixes of the variables that say which rank of which job a process is. Those of a Slurm allocation, rather than
# of a step in it, stay: they say where a new job may run.
_OF_A_JOB = (
    *("PMI_", "PMI2_", "HYDI_", "MPI_LOCAL", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "OMPI_COMM_WORLD_"),
    *("MV2_COMM_WORLD_", "PALS_", "FLUX_TASK_", "SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"),
)


def outside_of_jobs() -> dict[str, str]:
    """Return the environment for a job of its own within a rank: an outer Slurm allocation stays."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", _RANK_PROCESS)
    left = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(_OF_A_JOB)}
    own, outer = MARKERS
    return {outer if name == own else name: value for name, value in left.items()}


MARKERS = "MPIDDP_MARKER", "MPIDDP_OUTER_MARKER"
"""The file by which `python -m mpiddp run` follows its job, and finds its processes; in a job within a rank."""

_RANK_PROCESS = "MPIDDP_RANK_PROCESS"
"""Left by a rank for the programs that it starts: its process id and its job's name."""

_VARIABLES = (
    *("MPIDDP_ALGORITHM", "MPIDDP_CACHE", "MPIDDP_CUDA_AWARE", "MPIDDP_DEBUG", "MPIDDP_DETERMINISTIC", "MPIDDP_EAGER"),
    *("MPIDDP_FLIGHT_RECORDER", "MPIDDP_NODES", "MPIDDP_TIMELINE", "MPIDDP_TIMEOUT", "MPIDDP_WARN_AFTER"),
)
_OTHER_VARIABLES = ("MPIDDP_LAUNCH", "MPIDDP_RESTARTS", *MARKERS, _RANK_PROCESS)  # the first two: of slurm/env.sh


def unknown_variables() -> list[str]:
    """Return a sentence for each variable that is named as mpiddp's and that nothing reads."""
    known = {*_VARIABLES, *_OTHER_VARIABLES}
    own = (name for name in os.environ if name.startswith("MPIDDP_") and not name.startswith("MPIDDP_TEST_"))
    found = []
    for name in sorted(set(own) - known):
        near = difflib.get_close_matches(name, _VARIABLES, 1, cutoff=0.8)  # all share MPIDDP_
        cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(_VARIABLES)}"
        found.append(f"{name} is set, and mpiddp has no such variable: {cure}")
    return found


# A job within a Slurm step has the step's name, too.
_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "PALS_APID", "FLUX_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def _job_names() -> tuple[str, str]:
    """Return the job's name, and the socket to the launcher, or ``""``.

    Hydra announces an mpirun inside a rank in the words of the outer one: only the socket differs. A program started by
    a rank has none, or the rank's own.
    """
    names = ",".join(os.environ.get(name, "") for name in _JOB_NAMES)
    try:
        found = os.fstat(_integer("PMI_FD") or -1)
    except OSError:
        return names, ""
    return names, str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""


def claim_rank() -> None:
    """Mark this process, for the programs that it starts, as the announced rank."""
    if launch() is not None:
        os.environ[_RANK_PROCESS] = " ".join([str(os.getpid()), *_job_names()])


def release_rank() -> None:
    """Take the mark back: the program that this process runs has not used MPI itself yet."""
    os.environ.pop(_RANK_PROCESS, None)


def started_by_rank() -> int | None:
    """Return the process of the rank whose launcher's variables this process has inherited; None if they are its own.

    Not found: a program started by a rank that has not used MPI through mpiddp.
    """
    mark = re.fullmatch(r"(\d+) (.*) (\d*)", os.environ.get(_RANK_PROCESS, ""))
    if launch() is None or mark is None:
        return None
    pid, names, socket = mark.groups()
    own_names, own_socket = _job_names()
    inherited = names == own_names and own_socket in ("", socket)
    return int(pid) if inherited and int(pid) != os.getpid() else None


def launcher_survives() -> bool:
    """Return True under ``mpirun --with-ft ulfm``: the other ranks live on when one fails."""
    return _switch("OMPI_MCA_mpi_ft_enable") is True


_COMPONENTS = "OMPI_MCA_coll"
_WRONG_AFTER_DEATHS = ("han", "adapt")


def survives() -> bool:
    """Return True if ranks can go on when one fails: the launcher lets them, and no sum comes out wrong."""
    components = os.environ.get(_COMPONENTS, "")
    excluded = components.removeprefix("^").split(",") if components.startswith("^") else []
    return launcher_survives() and all(each in excluded for each in _WRONG_AFTER_DEATHS)


def prepare_survival() -> None:
    """Keep out Open MPI's component "han", whose sums between nodes are wrong after a failure (5.0.11)."""
    if launcher_survives():
        os.environ.setdefault(_COMPONENTS, "^" + ",".join(_WRONG_AFTER_DEATHS))


def pretended_nodes() -> tuple[int, ...] | None:
    """Return the pretended node of every rank (e.g. ``0,0,1,1``), for tests."""
    text = os.environ.get("MPIDDP_NODES")
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingError(f"MPIDDP_NODES must be one integer for each rank, such as 0,0,1,1; got {text!r}") from None


def default_timeout_s() -> float:
    """Return the default time limit of an operation (30 minutes)."""
    text, seconds = _number("MPIDDP_TIMEOUT", "1800")
    if not 0 < seconds < math.inf:
        raise SettingError(f"MPIDDP_TIMEOUT must be a finite number of seconds above 0; got {text!r}")
    return seconds


def warn_after_s() -> float:
    """Return the seconds of waiting before the first warning; 0: no warnings."""
    text, seconds = _number("MPIDDP_WARN_AFTER", "60")
    if not seconds >= 0:
        raise SettingError(f"MPIDDP_WARN_AFTER must be a number of seconds, or 0 for no warnings; got {text!r}")
    return seconds


def flight_recorder() -> str | None:
    """Return the beginning of the names of dumps; "0": none; or None."""
    return os.environ.get("MPIDDP_FLIGHT_RECORDER") or None


def debug_level() -> str:
    """Return OFF, INFO (log every operation) or DETAIL (compare every operation over the group)."""
    level = os.environ.get("MPIDDP_DEBUG", "OFF").upper()
    if level not in ("OFF", "INFO", "DETAIL"):
        raise SettingError(f"MPIDDP_DEBUG must be OFF, INFO or DETAIL; got {level!r}")
    return level


def marker() -> Path | None:
    """Return the file by which `python -m mpiddp run` follows its job, or None."""
    text = os.environ.get(MARKERS[0])
    return Path(text) if text else None


def timeline() -> str | None:
    """Return the file of a trace of all ranks, or None."""
    return os.environ.get("MPIDDP_TIMELINE") or None


def job_end_s() -> int | None:
    """Return the end of this Slurm job in seconds since 1970, or None."""
    return _integer("SLURM_JOB_END_TIME")


def deterministic() -> bool:
    """Return True if MPI's own reductions are kept out."""
    return _switch("MPIDDP_DETERMINISTIC") is True


def algorithms() -> dict[str, str]:
    """Return the choices by operation (e.g. ``all_reduce:ring,broadcast:native``)."""
    text = os.environ.get("MPIDDP_ALGORITHM", "")
    chosen = {}
    for part in filter(None, text.split(",")):
        operation, colon, name = part.strip().partition(":")
        if not (operation and colon and name):
            raise SettingError(
                f"MPIDDP_ALGORITHM must be OPERATION:ALGORITHM[,...], such as all_reduce:ring; got {text!r}"
            )
        chosen[operation] = name
    return chosen


def takes_device_pointers() -> bool | None:
    """Return the user's word on the MPI library, or None."""
    return _switch("MPIDDP_CUDA_AWARE")


def cray_gpu_support() -> bool:
    """Return True if Cray MPICH is set to take device pointers."""
    return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


_TRANSPORTS = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_accelerator", "OMPI_MCA_opal_cuda_support"),
    *("UCX_TLS", "FI_PROVIDER", "MPIR_CVAR_ENABLE_GPU", "MPIR_CVAR_CH4_NETMOD", "MPICH_GPU_SUPPORT_ENABLED"),
    *("MV2_USE_CUDA", "I_MPI_OFFLOAD", "I_MPI_FABRICS"),
)


def transports() -> list[str]:
    """Return the MPI libraries' transport variables as NAME=value: their use of GPU memory depends on them."""
    return [f"{name}={os.environ[name]}" for name in _TRANSPORTS if name in os.environ]


def eager() -> bool:
    """Return True if short arrays may use eager buffers."""
    return _switch("MPIDDP_EAGER") is not False


def cache_folder() -> Path:
    given = os.environ.get("MPIDDP_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiddp"


def cores(pid: int = 0) -> set[int]:
    """Return the cores of a process's affinity mask."""
    return os.sched_getaffinity(pid) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def core_mask() -> int:
    """Return the cores of this process as the bits of an integer."""
    return sum(1 << core for core in cores())


def available_cores() -> int:
    return len(cores())


def blas_threads() -> int | None:
    found = [value for value in (_integer(name) for name in THREAD_VARIABLES) if value is not None]
    return min(found) if found else None


def _launcher_cores() -> int:
    """Return the cores of the parent, the launcher's daemon: all ranks of the node share them."""
    count = len(cores(os.getppid()))
    return min(count, _integer("SLURM_CPUS_ON_NODE") or count)


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

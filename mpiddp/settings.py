"""mpiddp's own environment variables, and a few variables of Slurm and of MPI libraries.

Each function reads its variable when it is called, so a test or a script may set it before. The module imports the
standard library only.
"""

import difflib
import math
import os
from pathlib import Path

from .launchers import integer
from .rank_process import MARKERS, RANK_PROCESS, outside_of_jobs as outside_of_jobs


class SettingError(ValueError):
    """An environment variable has an invalid value. The text says what was expected."""


def _switch(name: str) -> bool | None:
    """Return a variable of 0 or 1 as a bool, or None if it is unset."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise SettingError(f"{name} must be 0 or 1; got {text!r}")
    return None if text == "" else text == "1"


def _number(name: str, default: str) -> tuple[str, float]:
    """Return a variable's text and the number that it means, or NaN if it is no number."""
    text = os.environ.get(name, default)
    try:
        return text, float(text)
    except ValueError:
        return text, math.nan


_VARIABLES = (
    *("MPIDDP_ALGORITHM", "MPIDDP_CACHE", "MPIDDP_CUDA_AWARE", "MPIDDP_DEBUG", "MPIDDP_DETERMINISTIC", "MPIDDP_EAGER"),
    *("MPIDDP_FLIGHT_RECORDER", "MPIDDP_NODES", "MPIDDP_TIMELINE", "MPIDDP_TIMEOUT"),
    "MPIDDP_WARN_AFTER",
)
_OTHER_VARIABLES = ("MPIDDP_LAUNCH", "MPIDDP_RESTARTS", *MARKERS, RANK_PROCESS)  # slurm/env.sh sets the first two


def unknown_variables() -> list[str]:
    """Return a sentence for each variable whose name begins as mpiddp's do and that mpiddp does not read."""
    known = {*_VARIABLES, *_OTHER_VARIABLES}
    own = (name for name in os.environ if name.startswith("MPIDDP_") and not name.startswith("MPIDDP_TEST_"))
    found = []
    for name in sorted(set(own) - known):
        near = difflib.get_close_matches(name, _VARIABLES, 1, cutoff=0.8)  # names begin alike
        cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(_VARIABLES)}"
        found.append(f"{name} is set, and mpiddp has no such variable: {cure}")
    return found


def pretended_nodes() -> tuple[int, ...] | None:
    """Return the node on which each rank should pretend to be, from MPIDDP_NODES, such as ``0,0,1,1``; for tests."""
    text = os.environ.get("MPIDDP_NODES")
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingError(f"MPIDDP_NODES must be one integer for each rank, such as 0,0,1,1; got {text!r}") from None


def default_timeout_s() -> float:
    """Return the default time limit of an operation: MPIDDP_TIMEOUT, or 30 minutes."""
    text, seconds = _number("MPIDDP_TIMEOUT", "1800")
    if not 0 < seconds < math.inf:
        raise SettingError(f"MPIDDP_TIMEOUT must be a finite number of seconds above 0; got {text!r}")
    return seconds


def warn_after_s() -> float:
    """Return the seconds that a rank waits before the first warning. 0 means no warnings."""
    text, seconds = _number("MPIDDP_WARN_AFTER", "60")
    if not seconds >= 0:
        raise SettingError(f"MPIDDP_WARN_AFTER must be a number of seconds, or 0 for no warnings; got {text!r}")
    return seconds


def flight_recorder() -> str | None:
    """Return the beginning of the names of the flight recorder's dumps, "0" for no dumps, or None for the default."""
    return os.environ.get("MPIDDP_FLIGHT_RECORDER") or None


def debug_level() -> str:
    """Return OFF, or INFO, with which every operation is logged."""
    level = os.environ.get("MPIDDP_DEBUG", "OFF").upper()
    if level not in ("OFF", "INFO"):
        raise SettingError(f"MPIDDP_DEBUG must be OFF or INFO, and calls are always compared; got {level!r}")
    return level


def timeline() -> str | None:
    """Return the name of the file for a timeline of all ranks, or None for no timeline."""
    return os.environ.get("MPIDDP_TIMELINE") or None


def job_end_s() -> int | None:
    """Return the end of this Slurm job in seconds since 1970, or None."""
    return integer("SLURM_JOB_END_TIME")


def deterministic() -> bool:
    """Return True if no reduction may use the MPI library's own algorithms, so that sums are added in one order."""
    return _switch("MPIDDP_DETERMINISTIC") is True


def algorithms() -> dict[str, str]:
    """Return the algorithm that the user has chosen for each operation, as in ``all_reduce:ring,broadcast:native``."""
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


def choosing_algorithms() -> str:
    """Return the variables by which ranks select algorithms, with their values. They must be equal on all ranks."""
    chosen = ",".join(f"{operation}:{name}" for operation, name in sorted(algorithms().items())) or "unset"
    return f"MPIDDP_ALGORITHM {chosen}, MPIDDP_DETERMINISTIC={deterministic():d}, MPIDDP_EAGER={eager():d}"


def takes_device_pointers() -> bool | None:
    """Return True or False if the user says whether the MPI library takes device pointers, else None."""
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
    """Return the variables that choose the transports of MPI libraries, as NAME=value.

    The libraries' use of GPU memory depends on these variables.
    """
    return [f"{name}={os.environ[name]}" for name in _TRANSPORTS if name in os.environ]


def eager() -> bool:
    """Return True if short arrays may use eager buffers, and messages may use FIFOs, in shared memory."""
    return _switch("MPIDDP_EAGER") is not False


def cache_folder() -> Path:
    given = os.environ.get("MPIDDP_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiddp"

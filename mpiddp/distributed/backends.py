"""Backends: everything runs on MPI, but for arrays of GPUs by NCCL if asked for; torch's names are understood."""

from __future__ import annotations

import logging
import warnings

from mpiddp.algorithms import nccl
from mpiddp.device.nccl import fault
from mpiddp.mpi.link import Link

from . import groups

logger = logging.getLogger("mpiddp")

_NAMES = "None, 'mpi', 'gloo' (an alias), 'nccl' (for CuPy arrays), or by device such as 'cpu:gloo,cuda:nccl'"


def check_backend(backend: str | None, default: str = "mpi") -> str:
    """Return the backend that a name stands for.

    Parameters
    ----------
    backend : str or None
        A name, or a list of ``device:name`` pairs, as in torch.
    default : str, default "mpi"
        What None stands for.

    Returns
    -------
    str
        ``"nccl"`` if arrays of GPUs are to go by NCCL, and this process has it; else ``"mpi"``, with a warning where
        NCCL was asked for.

    Raises
    ------
    ValueError
        If a name is unknown; the text lists the known ones.
    """
    if backend is None:
        return default
    if not isinstance(backend, str):
        raise ValueError(f"backend must be one of {_NAMES}; got {backend!r}")
    found = "mpi"
    for part in backend.lower().split(","):
        device, _, name = part.strip().rpartition(":")
        if name not in ("mpi", "gloo", "nccl") or device not in ("", "cpu", "cuda"):
            raise ValueError(f"Unknown backend {part.strip()!r}: backend must be one of {_NAMES}")
        if name == "gloo":
            logger.info("backend 'gloo' is an alias here: arrays go over MPI")
        if name == "nccl" and device != "cpu":
            if fault() is None:
                found = "nccl"
            else:
                warnings.warn(f"backend 'nccl' gives 'mpi' here: {fault()}", stacklevel=3)
    return found


def connect(link: Link, backend: str) -> None:
    """Connect the ranks of a new group by NCCL, if that is its backend; all of them call.

    Where they share a GPU, or some have none, their arrays go over MPI, and the first rank warns.
    """
    wrong = nccl.connect(link, backend == "nccl")
    if wrong is not None and backend == "nccl" and link.rank == 0:
        warnings.warn(f"backend 'nccl' gives 'mpi' in {link}: {wrong}", stacklevel=4)


def backend_of(link: Link) -> str:
    """Return the backend of a group's arrays on GPUs; arrays of the host go over MPI in any."""
    return "nccl" if nccl.connected(link) else "mpi"


groups.before_destroy.append(lambda group: nccl.disconnect(group.link))


def is_mpi_available() -> bool:
    """Tell whether MPI can be used: always True, or importing mpiddp.distributed would have failed."""
    return True


def is_gloo_available() -> bool:
    """Tell whether Gloo is used: never; the name is an alias of MPI."""
    return False


def is_nccl_available() -> bool:
    """Tell whether NCCL can be used for CuPy arrays."""
    return fault() is None


def is_backend_available(backend: str) -> bool:
    """Tell whether a backend can be used, by its name."""
    return {"mpi": is_mpi_available, "gloo": is_gloo_available, "nccl": is_nccl_available}.get(
        backend.lower(), lambda: False
    )()

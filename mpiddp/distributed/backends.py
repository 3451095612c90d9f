"""Backends: everything runs on MPI; the names of torch's backends are understood."""

from __future__ import annotations

import logging
import warnings

from mpiddp.device import cuda_fault

logger = logging.getLogger("mpiddp")

_NAMES = "None, 'mpi', 'gloo' (an alias), 'nccl' (for CuPy arrays), or by device such as 'cpu:gloo,cuda:nccl'"


def nccl_fault() -> str | None:
    """Return why NCCL cannot be used, or None where it can."""
    return cuda_fault() or "the NCCL backend is not part of this version; CuPy arrays go over MPI"


def check_backend(backend: str | None) -> str:
    """Return the backend that a name stands for.

    Parameters
    ----------
    backend : str or None
        A name, or a list of ``device:name`` pairs, as in torch.

    Returns
    -------
    str
        ``"mpi"``.

    Raises
    ------
    ValueError
        If a name is unknown; the text lists the known ones.
    """
    if backend is None:
        return "mpi"
    if not isinstance(backend, str):
        raise ValueError(f"backend must be one of {_NAMES}; got {backend!r}")
    for part in backend.lower().split(","):
        device, _, name = part.strip().rpartition(":")
        if name not in ("mpi", "gloo", "nccl") or device not in ("", "cpu", "cuda"):
            raise ValueError(f"Unknown backend {part.strip()!r}: backend must be one of {_NAMES}")
        if name == "gloo":
            logger.info("backend 'gloo' is an alias here: arrays go over MPI")
        if name == "nccl" and device != "cpu":
            warnings.warn(f"backend 'nccl' gives 'mpi' here: {nccl_fault()}", stacklevel=3)
    return "mpi"


def is_mpi_available() -> bool:
    """Tell whether MPI can be used: always True, or importing mpiddp.distributed would have failed."""
    return True


def is_gloo_available() -> bool:
    """Tell whether Gloo is used: never; the name is an alias of MPI."""
    return False


def is_nccl_available() -> bool:
    """Tell whether NCCL can be used for CuPy arrays."""
    return nccl_fault() is None


def is_backend_available(backend: str) -> bool:
    """Tell whether a backend can be used, by its name."""
    return {"mpi": is_mpi_available, "gloo": is_gloo_available, "nccl": is_nccl_available}.get(
        backend.lower(), lambda: False
    )()

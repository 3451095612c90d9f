"""Backends: MPI, and NCCL for arrays on GPUs if asked for."""

from __future__ import annotations

import logging
from datetime import timedelta

from mpiddp.algorithms.gpu import nccl
from mpiddp.device.nccl import fault
from mpiddp.mpi.link import Link
from mpiddp.mpi.recorder import warn

logger = logging.getLogger("mpiddp")

default_pg_timeout = timedelta(minutes=30)
"""Without ``timeout=`` and ``MPIDDP_TIMEOUT``."""


class Backend(str):
    """The name of a backend in lower case; ValueError if it is no string.

    Examples
    --------
    >>> Backend("GLOO") == Backend.GLOO == "gloo"
    True
    """

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    MPI = "mpi"

    __slots__ = ()

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(f"Backend needs a name, got {name!r}")
        return super().__new__(cls, name.lower())


_NAMES = "None, 'mpi', 'gloo' (an alias), 'nccl' (for CuPy arrays), or by device such as 'cpu:gloo,cuda:nccl'"


def check_backend(backend: str | None, default: str = "mpi") -> str:
    """Return "nccl" for arrays on GPUs, else "mpi"; ValueError for unknown names."""
    if backend is None or backend == Backend.UNDEFINED:
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
            found = "nccl"
    return found


def connect(link: Link, backend: str) -> None:
    """Connect by NCCL, if that is the backend; collective; where NCCL cannot, rank 0 warns."""
    wrong = nccl.connect(link, backend == "nccl")
    if wrong is not None and backend == "nccl" and link.rank == 0:
        warn(f"backend 'nccl' gives 'mpi' in {link}: {wrong}")


def backend_of(link: Link) -> str:
    return "nccl" if nccl.connected(link) else "mpi"


def is_mpi_available() -> bool:
    """Return True."""
    return True


def is_gloo_available() -> bool:
    """Return False: "gloo" is an alias of MPI."""
    return False


def is_nccl_available() -> bool:
    """Return whether NCCL can be used for CuPy arrays."""
    return fault() is None


def is_ucc_available() -> bool:
    """Return False; an MPI library may use UCC below."""
    return False


def is_xccl_available() -> bool:
    """Return False."""
    return False


def is_torchelastic_launched() -> bool:
    """Return False: MPI's launcher starts the processes."""
    return False


def is_backend_available(backend: str) -> bool:
    """Return whether this backend, in any case, can be used."""
    name = backend.lower()
    return name == Backend.MPI or (name == Backend.NCCL and is_nccl_available())

"""Backends: everything runs on MPI, but for arrays of GPUs by NCCL if asked for; torch's names are understood."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta

from mpiddp.algorithms.gpu import nccl
from mpiddp.device.nccl import fault
from mpiddp.mpi.link import Link

logger = logging.getLogger("mpiddp")

default_pg_timeout = timedelta(minutes=30)
"""Time limit of an operation without ``timeout=`` and ``MPIDDP_TIMEOUT``."""


class Backend(str):
    """The name of a backend in small letters (``torch.distributed.Backend``).

    Parameters
    ----------
    name : str
        In any letters; names that are not known are kept, and refused where they are used.

    Raises
    ------
    ValueError
        If it is no string.

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
        """Return the name in small letters."""
        if not isinstance(name, str):
            raise ValueError(f"Backend needs a name, got {name!r}")
        return super().__new__(cls, name.lower())


_NAMES = "None, 'mpi', 'gloo' (an alias), 'nccl' (for CuPy arrays), or by device such as 'cpu:gloo,cuda:nccl'"


def check_backend(backend: str | None, default: str = "mpi") -> str:
    """Return the backend that a name stands for.

    Parameters
    ----------
    backend : str or None
        A name, or a list of ``device:name`` pairs, as in torch.
    default : str, default "mpi"
        The meaning of None and ``Backend.UNDEFINED``.

    Returns
    -------
    str
        ``"nccl"`` if arrays of GPUs are to go by NCCL, whether they can or not; else ``"mpi"``.

    Raises
    ------
    ValueError
        If a name is unknown; the text lists the known ones.
    """
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
    """Connect the ranks of a new group by NCCL, if that is its backend; all of them call.

    If they share a GPU, or some have none, or no NCCL, their arrays go over MPI, and the first rank warns.
    """
    wrong = nccl.connect(link, backend == "nccl")
    if wrong is not None and backend == "nccl" and link.rank == 0:
        warnings.warn(f"backend 'nccl' gives 'mpi' in {link}: {wrong}", stacklevel=3)


def backend_of(link: Link) -> str:
    """Return the backend of a group's arrays on GPUs; arrays of the host go over MPI in any."""
    return "nccl" if nccl.connected(link) else "mpi"


def is_mpi_available() -> bool:
    """Return whether MPI can be used: always True, or importing mpiddp.distributed would have failed."""
    return True


def is_gloo_available() -> bool:
    """Return whether Gloo is used: never; the name is an alias of MPI."""
    return False


def is_nccl_available() -> bool:
    """Return whether NCCL can be used for CuPy arrays (``torch.distributed.is_nccl_available``)."""
    return fault() is None


def is_ucc_available() -> bool:
    """Return whether UCC is used: never; an MPI library may use it below."""
    return False


def is_xccl_available() -> bool:
    """Return whether XCCL is used: never."""
    return False


def is_torchelastic_launched() -> bool:
    """Return whether torchrun has started this process to watch over it: never; MPI's launcher does."""
    return False


def is_backend_available(backend: str) -> bool:
    """Return whether a backend can be used (``torch.distributed.is_backend_available``).

    Parameters
    ----------
    backend : str
        Its name, in any letters; False for one that is not known.
    """
    return {"mpi": is_mpi_available, "gloo": is_gloo_available, "nccl": is_nccl_available}.get(
        backend.lower(), lambda: False
    )()

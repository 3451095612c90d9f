"""The names of backends. Arrays travel by MPI and shared memory; arrays on GPUs by NCCL if a group asks for it."""

from datetime import timedelta

from mpiddp.algorithms.gpu import nccl
from mpiddp.device.nccl import fault
from mpiddp.mpi.link import Link
from mpiddp.mpi.recorder import warn

default_pg_timeout = timedelta(minutes=30)
"""The time limit of operations if neither ``timeout=`` nor ``MPIDDP_TIMEOUT`` sets another one."""


class Backend(str):
    """The name of a backend, in lower case as in torch. ValueError if it is no string.

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

    def __new__(cls, name: str) -> "Backend":
        if not isinstance(name, str):
            raise ValueError(f"Backend needs a name, got {name!r}")
        return super().__new__(cls, name.lower())


_NAMES = "None, 'mpi', 'gloo' (an alias), 'nccl' (for CuPy arrays), or by device such as 'cpu:gloo,cuda:nccl'"


def check_backend(backend: str | None, default: str = "mpi") -> str:
    """Return "nccl" if a backend's name asks for it, else "mpi"; ``default`` if no backend is named.

    ValueError for an unknown name.
    """
    if backend is None or backend == Backend.UNDEFINED:
        return default
    kind = "mpi"
    for part in str(backend).lower().split(","):
        device, _, name = part.strip().rpartition(":")
        if name not in ("mpi", "gloo", "nccl") or device not in ("", "cpu", "cuda"):
            raise ValueError(f"Unknown backend {part.strip()!r}: backend must be one of {_NAMES}")
        if name == "nccl" and device != "cpu":
            kind = "nccl"
    return kind


def connect(link: Link, backend: str) -> None:
    """Connect the ranks by NCCL if the group asks for it; rank 0 warns if this is impossible. Collective."""
    wrong = nccl.connect(link, backend == "nccl")
    if wrong is not None and backend == "nccl" and link.rank == 0:
        warn(f"backend 'nccl' gives 'mpi' in {link}: {wrong}")


def backend_of(link: Link) -> str:
    return "nccl" if nccl.connected(link) else "mpi"


def is_mpi_available() -> bool:
    """Return True: mpi4py is always installed with mpiddp."""
    return True


def is_gloo_available() -> bool:
    """Return False: "gloo" is an alias of MPI."""
    return False


def is_nccl_available() -> bool:
    """Return whether NCCL can be used for CuPy arrays."""
    return fault() is None


def is_ucc_available() -> bool:
    """Return False. An MPI library may still use UCC by itself."""
    return False


def is_xccl_available() -> bool:
    """Return False: XCCL, Intel's library for GPUs, is not used."""
    return False


def is_torchelastic_launched() -> bool:
    """Return False: MPI's launcher starts the processes."""
    return False


def is_backend_available(backend: str) -> bool:
    """Return whether a backend can be used; ``backend`` is its name, in upper or lower case.

    Examples
    --------
    >>> is_backend_available("MPI"), is_backend_available("gloo")
    (True, False)
    """
    name = backend.lower()
    return name == Backend.MPI or (name == Backend.NCCL and is_nccl_available())

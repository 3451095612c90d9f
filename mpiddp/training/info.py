"""Description of a job, for ``mpiddp info`` and for ``run.json`` beside a run's results: versions, MPI, ranks."""

import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp.distributed as dist
from mpiddp import launchers
from mpiddp.algorithms import plan
from mpiddp.algorithms.ways import TRIES, WARM_UPS, Ways
from mpiddp.cores import available_cores, blas_threads, cores
from mpiddp.device import cuda_fault, device_count
from mpiddp.distributed.groups import default_group
from mpiddp.faults import this_job
from mpiddp.faults.job import Job
from mpiddp.faults.picture import spans
from mpiddp.mpi import cuda_aware
from mpiddp.mpi.world import World
from mpiddp.shm import segment

from .ranks import gathered

_TRIED_BYTES = (1 << 17, 1 << 20, 1 << 24)
_PACKAGES = ("mpi4py", "numpy", "safetensors")
# CuPy's wheels have other names than its module.
_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")


def collect(version: str) -> dict[str, Any]:
    """Return the description of the job as JSON values. All ranks call this together.

    The item "ranks" describes each rank. Some other items, such as "cuda" and "command", are those of the calling rank.
    """
    job = default_group()._monitor.job
    world = job.world
    return {
        "versions": {"mpiddp": version, **cuda_aware.installed(*_PACKAGES, *_CUPY_WHEELS)},
        "python": platform.python_version(),
        "mpi": cuda_aware.inspect(world.comm),
        "watchdog": _watchdog(job),
        "dead_ranks": _failed_ranks(job),
        "shared_memory": _shared_memory(),
        "algorithms": _algorithms(),
        "blas": {"name": _blas_name(), "threads": blas_threads() or available_cores()},
        "cuda": cuda_fault() or "usable",
        "ranks": gathered(_place(world)),
        "crowded": world.crowded,
        "command": " ".join(sys.argv),
    }


def complaints(found: dict[str, Any]) -> list[str]:
    """Return a sentence for each likely mistake in a job's description, with its cure."""
    said = []
    wheels = found["mpi"]["wheels"]
    if len(wheels) > 1:
        said.append(
            f"several MPI wheels are installed in this environment ({', '.join(wheels)}); they overwrite each other's"
            " files: pip uninstall all of them, then install one"
        )
    if found["crowded"]:
        said.append("more ranks than cores on a node: they wait for each other's turns; start fewer")
    return said


def text(found: dict[str, Any]) -> str:
    mpi, blas = found["mpi"], found["blas"]
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("python", f"{found['python']} ({sys.executable})"),
        ("MPI library", f"{mpi['library']} (MPI {mpi['standard']}, ABI {mpi['abi']})"),
        ("loaded from", mpi["path"] or "unknown"),
        ("pip's MPI", ", ".join(mpi["wheels"]) or "none: the library is the system's"),
        ("thread level", mpi["thread_level"]),
        ("launcher", mpi["launcher"] or "none: started plainly"),
        ("watchdog", found["watchdog"]),
        ("dead ranks", found["dead_ranks"]),
        ("shared memory", found["shared_memory"]),
        ("BLAS", f"{blas['name']}, threads a rank: {blas['threads']}"),
        ("CUDA", found["cuda"]),
        *(("algorithms", f"{operation}: {rows}") for operation, rows in found["algorithms"].items()),
        *(("ordinary arrays", f"{operation}: {text}") for operation, text in found["ordinary_arrays"].items()),
        *(("GPU pointers", _device_pointers(kind, mpi["device_pointers"][kind])) for kind in cuda_aware.KINDS),
    ]
    lines = [f"{name:<14} {value}" for name, value in rows]
    lines += ["", *_table(found["ranks"])]
    return "\n".join([*lines, *(f"warning: {complaint}" for complaint in complaints(found))])


def run(version: str, as_json: bool) -> int:
    """Start MPI, print the description of the job, and return the exit code."""
    dist.init_process_group()
    found = collect(version) | {"ordinary_arrays": _ways()}
    if dist.get_rank() == 0:
        print(json.dumps(found | {"warnings": complaints(found)}, indent=2) if as_json else text(found), flush=True)
    dist.destroy_process_group()
    return 0


def _place(world: World) -> dict[str, Any]:
    count = device_count()
    return {
        "rank": world.rank,
        "host": world.hosts[world.rank],
        "node": world.nodes[world.rank],
        "local_rank": world.local_rank,
        "pid": os.getpid(),
        "cores": sorted(cores()),
        "gpu": world.local_rank % count if count else None,
    }


def _table(places: list[dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [("rank", "host", "node", "local rank", "cores", "GPU")]
    for p in places:
        masks = ",".join(text for text, _ in spans(p["cores"]))
        values = p["rank"], p["host"], p["node"], p["local_rank"], masks, p["gpu"]
        rows.append(tuple("-" if value is None else str(value) for value in values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _device_pointers(kind: str, answer: dict[str, Any]) -> str:
    name = kind.replace("_", " ")
    return f"{name}: {'taken as they are' if answer['yes'] else 'staged through the host'}; {answer['reason']}"


def _failed_ranks(job: Job) -> str:
    if job.failures.survivable:
        return "the others go on"
    if launchers.launcher_survives():
        return "end the job: MPI was started without OMPI_MCA_coll=^han,adapt, after which sums could be wrong"
    return "end the job"


def _watchdog(job: Job) -> str:
    if job.world.size == 1:
        return "off: a world of one waits for nobody"
    if job.world.thread_multiple:
        return "on"
    return f"off: {this_job.why_unwatched(job)}, so a hang inside of MPI is not noticed"


def _shared_memory() -> str:
    """Return the kind of shared memory that the ranks of a node use, or why they use none.

    All ranks call this together.
    """
    with warnings.catch_warnings(record=True, action="always") as caught:
        array = dist.symmetric_empty(1, np.uint8)
    assert array is not None, "every rank is in the default group"
    if segment.find(array) == segment.NOWHERE:
        return "; ".join(str(warning.message) for warning in caught) or "not needed: one rank on each node"
    return "memfd" if "/memfd:" in Path("/proc/self/maps").read_text() else "files in /dev/shm"


def _algorithms() -> dict[str, str]:
    link = default_group()._link
    return {name: ", ".join(_up_to(*row) for row in plan.rows(name, link)) for name in plan.ONE_NODE}


def _ways() -> dict[str, str]:
    """Return the algorithms that the ranks agree on for long arrays outside symmetric memory, after trying them.

    All ranks call this together.
    """
    group, ranks = default_group(), dist.get_world_size()
    for size in _TRIED_BYTES if group._link.one_node and ranks > 1 else ():
        x = np.zeros(size // ranks * ranks, np.uint8)
        block = x[: size // ranks].copy()
        for _ in range(1 + WARM_UPS + 4 * TRIES):
            dist.all_reduce(x, dist.ReduceOp.MAX)
            dist.broadcast(x, 0)
            dist.all_gather_single(x, block)
            dist.reduce_scatter_single(block, x, dist.ReduceOp.MAX)
    return group._link.resource(Ways).described()


def _up_to(limit: float, name: str) -> str:
    return name if limit == plan.ANY_SIZE else f"{name} to {limit / 1024:g} KiB"


def _blas_name() -> str:
    blas: Any = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()

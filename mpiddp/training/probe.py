"""The probe for device pointers: it tries calls on GPU arrays, to find out if the MPI library takes their addresses.

``python -m mpiddp info --probe-gpu`` calls `run`. It starts a job of two ranks for each kind of communication, because
an unsuitable MPI library may crash. The outcomes are kept in a file for this user, MPI library and its transports. The
job runs this module as a program: it makes calls on GPU arrays and compares the results with those on host arrays. Its
rank 0 prints lines of JSON, which `_try` reads: the library, the start of the trial, and the outcome.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp.distributed as dist
from mpiddp import device, launchers, settings
from mpiddp.device import array_namespace, is_device_array
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.cuda_aware import KINDS, Support, library_key, outcomes_file, probed
from mpiddp.mpi.reduction import REDUCTIONS, check
from mpiddp.serialization import write_atomically
from mpiddp.typing import Array

from .options import UsageError, refusing
from .ranks import of_any_rank

RANKS = 2
LIMIT_S = 60.0
"""Seconds that a job of the probe may take. A longer job counts as failed."""

_SHORT = (1, 3_001)
_LONG = (200_003, 3_000_017)
"""Numbers of elements. MPI libraries send short messages at once, but announce long ones first or send them in parts.
The probe tries both."""
_DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64", "complex64")
_OPS = (*(op for op in REDUCTIONS if op.name not in ("PREMUL_SUM", "EXACT_SUM")), dist.ReduceOp.PREMUL_SUM(0.5))
_KINDS = {
    "point_to_point": [
        *((length, "float32") for length in (*_SHORT, *_LONG)),
        *((_LONG[0], dtype) for dtype in ("bool", "float16", "int64")),
    ],
    "collectives": [
        *((length, dtype) for dtype in _DTYPES for length in _SHORT),
        *((length, "float32") for length in _LONG),
    ],
}
"""The lengths and dtypes of the arrays that the probe tries, for each kind of communication."""


def _remember(key: str, kind: str, outcome: Support) -> None:
    kinds = {**probed(key), kind: outcome}
    write_atomically(outcomes_file(key), (json.dumps(kinds, indent=1) + "\n").encode())


def job_command(kind: str) -> list[str]:
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    launcher = beside or next(filter(None, map(shutil.which, ("mpiexec", "mpirun", "srun"))), None)
    if launcher is None:
        raise UsageError(
            f"--probe-gpu: no mpiexec beside {sys.executable}, and no mpiexec, mpirun or srun on PATH, to start a job"
        )
    return [launcher, "-n", str(RANKS), sys.executable, "-m", "mpiddp.training.probe", kind]


def run(command: Callable[[str], Sequence[str]] = job_command, limit_s: float = LIMIT_S) -> dict[str, Support]:
    """Try every kind of communication in a job of its own, and write the outcomes to `outcomes_file`.

    Each job takes at most ``limit_s`` seconds. UsageError if there is no launcher, no working MPI or no GPU.
    """
    outcomes = {}
    for kind in KINDS:
        key, outcomes[kind] = _try(command(kind), limit_s)
        _remember(key, kind, outcomes[kind])
    return outcomes


def _try(command: Sequence[str], limit_s: float) -> tuple[str, Support]:
    began = time.monotonic()
    with refusing("--probe-gpu: a process of the job cannot be ended: ", subprocess.TimeoutExpired):
        job = subprocess.run(
            ["timeout", "-k5", str(limit_s), *command],  # `timeout` signals all processes of its group
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=settings.outside_of_jobs(),
            timeout=limit_s + 15,
        )
    took_s = time.monotonic() - began
    said = _said(job.stdout)
    key, last = said.get("library"), _last_words(job.stderr)
    if key is None or "tries" not in said:
        why = said.get("fault") or f"it ended with exit code {job.returncode}: {last}"
        raise UsageError(
            f"--probe-gpu: the job that tries device pointers could not do it: {why} ({' '.join(command)})"
        )
    nodes = "one node" if said.get("nodes") == 1 else f"{said.get('nodes')} nodes"
    when = f"{RANKS} ranks on {nodes}, {time.strftime('%Y-%m-%d')}"
    if took_s > limit_s:
        return key, Support(False, f"a probe did not end in {limit_s:g} s ({when})")
    if "wrong" in said:
        return key, Support(False, f"a probe got wrong values: {said['wrong']} ({when})")
    if job.returncode or "right" not in said:
        return key, Support(False, f"a probe {_end_of(job.returncode)}: {last} ({when})")
    return key, Support(True, f"a probe tried it ({when}, {took_s:.0f} s)")


def _last_words(complaint: str) -> str:
    """Return the line of a job's stderr that says how the job ended, usually the last one.

    After a crash that is Python's line "Fatal Python error", which a stack and a list of modules follow.
    """
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])


def _end_of(code: int) -> str:
    """Describe an exit code in words. If a signal ended a rank, the launcher returns 128 + the signal's number."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _said(output: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                said |= document
    return said


def _point_to_point(x: Array) -> Iterator[tuple[str, Array]]:
    xp, rank = array_namespace(x), dist.get_rank()
    for first in (0, x.size // 3):
        found = xp.zeros_like(x)
        works = dist.irecv(found[first:], 1 - rank), dist.isend(x[first:], 1 - rank)
        for work in works:
            assert work is not None
            work.wait()
        yield f"isend and irecv from element {first} on", found
    for sender in (0, 1):
        if rank == sender:
            dist.send(x, 1 - rank)
        else:
            dist.recv(found, sender)
    yield "send and recv", found
    blocks, is_root = xp.stack([x, x[::-1]]), rank == 0
    dist.all_gather_single(found := xp.zeros_like(blocks), x)
    yield "all_gather", found
    dist.gather(x, list(found := xp.zeros_like(blocks)) if is_root else None)
    yield "gather", found if is_root else x
    dist.scatter(found := xp.zeros_like(x), list(blocks) if is_root else None)
    yield "scatter", found
    dist.all_to_all(list(found := xp.zeros_like(blocks)), list(blocks))
    yield "all_to_all", found
    dist.all_to_all_single(found := xp.zeros_like(blocks), blocks)
    yield "all_to_all_single", found
    dist.all_reduce(found := x.copy(), algorithm="device_ring" if is_device_array(x) else None)
    yield "a ring", found


def _collectives(x: Array) -> Iterator[tuple[str, Array]]:
    xp = array_namespace(x)
    dist.broadcast(found := x.copy(), 1)
    yield "broadcast", found
    for op in _OPS if x.size in _SHORT else _OPS[:1]:
        try:
            check(x.dtype, op)
        except TypeError:
            continue
        dist.all_reduce(found := x.copy(), op)
        yield f"all_reduce with {op}", found
        dist.reduce(found := x.copy(), 1, op)
        yield f"reduce with {op}", found
        dist.reduce_scatter_single(found := xp.zeros_like(x), xp.stack([x, x[::-1]]), op)
        yield f"reduce_scatter with {op}", found


def _wrong(kind: str) -> str | None:
    """Try all calls of a kind; name the first one whose GPU result on this rank differs from the host's, else None."""
    calls, wrong = {"point_to_point": _point_to_point, "collectives": _collectives}[kind], None
    for length, dtype in _KINDS[kind]:
        x = ((np.arange(length) + dist.get_rank()) % 3).astype(dtype)  # small integers: sums and products are exact
        for (what, found), (_, expected) in zip(calls(device.upload(x)), calls(x), strict=True):
            if wrong is None and not np.array_equal(device.download(found), expected):
                wrong = f"{what} of {length} {dtype} on rank {dist.get_rank()}"
    return wrong


def main(kind: str) -> int:
    os.environ["MPIDDP_CUDA_AWARE"] = "1"
    for name in ("MPIDDP_ALGORITHM", "MPIDDP_DETERMINISTIC"):  # these may select algorithms without device pointers
        os.environ.pop(name, None)
    announced, count, fault = launchers.launch(), device.device_count(), device.cuda_fault()
    local_rank = 0 if announced is None else announced.local_rank or 0
    dist.init_process_group(device_id=local_rank % count if count else None, timeout=LIMIT_S)
    _say(library=library_key())
    if dist.get_world_size() != RANKS:
        fault = f"it runs on other than {RANKS} ranks: the launcher does not belong to the library"
    fault = of_any_rank(fault)
    if fault is not None:
        _say(fault=fault)
        return 1
    _say(tries=kind, nodes=default_group()._link.node_count)
    wrong = of_any_rank(_wrong(kind))
    _say(**({"right": kind} if wrong is None else {"wrong": wrong}))
    return 0


def _say(**what: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    assert len(sys.argv) == 2 and sys.argv[1] in KINDS, "probe names the kind"
    sys.exit(main(sys.argv[1]))

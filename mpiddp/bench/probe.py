"""The probe for device pointers: it tries calls on GPU arrays, to find out if the MPI library takes their addresses.

``python -m mpiddp info --probe-gpu`` calls `run`. It starts a job of two ranks for each kind of communication, because
an unsuitable MPI library may crash. The outcomes are kept in a file for this user, MPI library and its transports. The
job runs this module as a program: it makes the benchmark's operations on GPU arrays and checks their results. Its rank
0 prints lines, which `_try` reads: the reason why it cannot try, or its nodes and the library, and then the outcome.
"""

import contextlib
import functools
import itertools
import json
import os
import re
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
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.cuda_aware import KINDS, Support, library_key, outcomes_file, probed
from mpiddp.mpi.reduction import REDUCTIONS, check
from mpiddp.serialization import write_atomically
from mpiddp.training.options import UsageError, refusing
from mpiddp.training.ranks import of_any_rank
from mpiddp.typing import Array

from .cli import OPERATIONS
from .operations import REDUCING, Buffers, mpiddp

RANKS = 2
LIMIT_S = 60.0
"""Seconds that a job of the probe may take. A longer job counts as failed."""
_RIGHT = "tried it"

_SHORT = (1, 3_001)
_LONG = (200_003, 3_000_017)
"""Numbers of elements. MPI libraries send short messages at once, but announce long ones first or send them in parts.
The probe tries both."""
_ARRAYS = [
    *itertools.product(_SHORT, ("bool", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64")),
    *itertools.product(_LONG, ("bool", "float32")),
]
_QUEUED = ("broadcast", *REDUCING)
_OPERATIONS = {
    "point_to_point": (*(name for name in OPERATIONS if name not in (*_QUEUED, "barrier")), "all_reduce"),
    "collectives": _QUEUED,
}
"""For each kind of communication the operations that go by it. Messages carry an all_reduce in a ring."""


def _remember(key: str, kind: str, outcome: Support) -> None:
    kinds = {**probed(key), kind: outcome}
    write_atomically(outcomes_file(key), (json.dumps(kinds, indent=1) + "\n").encode())


def job_command(kind: str) -> list[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    launchers_found = (shutil.which(name, path=path) for name in ("mpiexec", "mpirun", "srun"))
    launcher = next(filter(None, launchers_found), None)
    if launcher is None:
        raise UsageError(
            f"--probe-gpu: no mpiexec beside {sys.executable}, and no mpiexec, mpirun or srun on PATH, to start a job"
        )
    return [launcher, "-n", str(RANKS), sys.executable, "-m", "mpiddp.bench.probe", kind]


def run(command: Callable[[str], Sequence[str]] = job_command, limit_s: float = LIMIT_S) -> dict[str, Support]:
    """Try every kind of communication in a job of its own, and write the outcomes to `outcomes_file`.

    Each job takes at most ``limit_s`` seconds. UsageError if there is no launcher, no working MPI or no GPU, and in a
    job of several ranks, where the probe cannot start its own job.
    """
    announced = launchers.launch()
    if announced is not None and announced.size > 1:
        raise UsageError("--probe-gpu starts a job of its own: run it alone, without a launcher")
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
    said = dict(re.findall(r"probe's (\w+): (.*)$", job.stdout, re.MULTILINE))
    how, end = said.get("outcome"), f"{_end_of(job.returncode)}: {_last_words(job.stderr)}"
    if "library" not in said:
        raise UsageError(
            f"--probe-gpu: the job that tries device pointers could not do it: {said.get('fault') or f'it {end}'}"
            f" ({' '.join(command)})"
        )
    if took_s > limit_s:
        how = f"did not end in {limit_s:g} s"
    elif how is None or job.returncode:
        how = end
    when = f"{RANKS} ranks on {said['nodes']}, {time.strftime('%Y-%m-%d')}, {took_s:.0f} s"
    return said["library"], Support(how == _RIGHT, f"a probe {how} ({when})")


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


def _reductions(dtype: np.dtype[Any]) -> Iterator[str]:
    for op in REDUCTIONS:
        with contextlib.suppress(TypeError):  # not defined for the dtype
            check(dtype, op)
            if op is not dist.ReduceOp.EXACT_SUM:  # which MPI does not sum
                yield op.name.lower()


def _on_device(first: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Make an array on the GPU that begins ``first`` elements after the beginning of its memory."""
    return device.upload(np.empty(first + count, dtype))[first:]


def wrong(kind: str) -> str | None:
    """Try all operations of a kind; name the first one whose result is wrong on this rank, else return None."""
    found, rank = None, dist.get_rank()
    algorithm = "device_ring" if kind == "point_to_point" else None
    for (length, name), operation, first in itertools.product(_ARRAYS, _OPERATIONS[kind], (0, 1)):
        dtype, allocate = np.dtype(name), functools.partial(_on_device, first)
        for op in _reductions(dtype) if operation in REDUCING and length in _SHORT else ("sum",):
            b = Buffers(operation, rank, dist.get_world_size(), length * dtype.itemsize, dtype, op, allocate)
            b.fill()
            mpiddp(b, algorithm if operation == "all_reduce" else None)()
            if b.count_wrong() and found is None:
                found = f"{operation} ({op}) of {b.count} {name}, from element {first} on, on rank {rank}"
    return found


def main(kind: str) -> None:
    os.environ["MPIDDP_CUDA_AWARE"] = "1"
    for name in ("MPIDDP_ALGORITHM", "MPIDDP_DETERMINISTIC"):  # these may select algorithms without device pointers
        os.environ.pop(name, None)
    fault = device.cuda_fault()  # it imports CuPy, so that init_process_group chooses a GPU
    dist.init_process_group(timeout=LIMIT_S)
    if dist.get_world_size() != RANKS:
        fault = f"it runs on other than {RANKS} ranks: the launcher does not belong to the library"
    fault = of_any_rank(fault)
    if fault is not None:
        _say("fault", fault)
        return
    nodes = default_group()._link.node_count
    _say("nodes", "one node" if nodes == 1 else f"{nodes} nodes")
    _say("library", library_key())
    found = of_any_rank(wrong(kind))
    _say("outcome", _RIGHT if found is None else f"got wrong values: {found}")


def _say(name: str, text: str) -> None:
    if dist.get_rank() == 0:
        print(f"probe's {name}: {' '.join(text.split())}", flush=True)


if __name__ == "__main__":
    assert len(sys.argv) == 2 and sys.argv[1] in KINDS, "probe names the kind"
    main(sys.argv[1])

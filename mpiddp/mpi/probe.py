"""The probe for device pointers: it tries each kind of communication in a job of two ranks, which may crash.

``python -m mpiddp info --probe-gpu`` runs it, and keeps the outcomes for this user, MPI library and its transports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpiddp import settings
from mpiddp.errors import DistError
from mpiddp.serialization import write_atomically

from .cuda_aware import KINDS, Support, outcomes_file, probed

RANKS = 2
LIMIT_S = 60.0
"""A job that takes longer counts as failed."""


class ProbeError(DistError):
    """The job could not try anything."""


def _remember(key: str, kind: str, outcome: Support) -> None:
    kinds = {**probed(key), kind: outcome}
    write_atomically(outcomes_file(key), (json.dumps(kinds, indent=1) + "\n").encode())


def job_command(kind: str) -> list[str]:
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec") or shutil.which("mpirun")
    launcher = launcher or shutil.which("srun")
    if launcher is None:
        raise ProbeError(f"no mpiexec beside {sys.executable}, and no mpiexec, mpirun or srun on PATH, to start a job")
    return [launcher, "-n", str(RANKS), sys.executable, "-m", "mpiddp.training.probe", kind]


def run(command: Callable[[str], Sequence[str]] = job_command, limit_s: float = LIMIT_S) -> dict[str, Support]:
    """Try every kind, in a job of at most ``limit_s`` seconds each, and write the outcomes to `outcomes_file`.

    ProbeError without a launcher, MPI or GPUs.
    """
    outcomes = {}
    for kind in KINDS:
        key, outcomes[kind] = _try(command(kind), limit_s)
        _remember(key, kind, outcomes[kind])
    return outcomes


def _try(command: Sequence[str], limit_s: float) -> tuple[str, Support]:
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=settings.outside_of_jobs(),
        start_new_session=True,
    ) as job:
        try:
            output, complaint = job.communicate(timeout=limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            output, complaint = _end(job)
            timed_out = True
    said = _said(output)
    key, last = said.get("library"), _last_words(complaint)
    if key is None or "tries" not in said:
        why = said.get("fault") or f"it ended with exit code {job.returncode}: {last}"
        raise ProbeError(f"the job that tries device pointers could not do it: {why} ({' '.join(command)})")
    nodes = "one node" if said.get("nodes") == 1 else f"{said.get('nodes')} nodes"
    when = f"{RANKS} ranks on {nodes}, {time.strftime('%Y-%m-%d')}"
    if timed_out:
        return key, Support(False, f"a probe did not end in {limit_s:g} s ({when})")
    if "wrong" in said:
        return key, Support(False, f"a probe got wrong values: {said['wrong']} ({when})")
    if job.returncode or "right" not in said:
        return key, Support(False, f"a probe {_end_of(job.returncode)}: {last} ({when})")
    return key, Support(True, f"a probe tried it ({when}, {time.monotonic() - began:.0f} s)")


def _last_words(complaint: str) -> str:
    """Return the line that says how a job ended: Python's own, of a crash, stands before its list of modules."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.communicate(timeout=5)
    return "", ""


def _end_of(code: int) -> str:
    """Describe an exit code. Launchers add 128 to the number of a signal."""
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

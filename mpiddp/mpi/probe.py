"""Whether MPI takes device pointers, found out by trying it in a job of its own, which may crash.

``python -m mpiddp info --probe-gpu`` starts that job, once for each kind of communication, and remembers what became of
it for this user, this very library and the transports that it was told to use: later jobs read it. The job itself,
``mpiddp.algorithms.gpu.probe``, makes the calls that the algorithms make, on one node as launchers place two ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
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

from .world import library_name
from .lazy import MPI
from .mapped import mapped_libraries
from .verdict import KINDS, Verdict

RANKS = 2
LIMIT_S = 60.0
"""How long a job may take: a library that waits for ever on a device pointer has failed."""

FORMAT = "mpiddp-device-pointers/2"


class ProbeError(DistError):
    """Nothing could be found out: the job did not come as far as trying."""


def library_path() -> str | None:
    """Return the file of the MPI library that this process has loaded, None where the system does not tell."""
    return next(iter(mapped_libraries("libmpi.so", "libmpi_abi.so", "libmpich")), None)


def library_key() -> str:
    """Return a name for this very library: name and version, and a digest of its description, place and transports.

    Two builds of one version differ in what they can do, and one build by the transports that its variables choose.
    """
    text = "\n".join([MPI.Get_library_version(), str(library_path()), *settings.transports()])
    name = re.sub(r"[^a-z0-9.]+", "-", library_name().lower()).strip("-")
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _file(key: str) -> Path:
    return settings.cache_folder() / f"device-pointers-{key}.json"


def known() -> dict[str, Verdict]:
    """Return what a probe has found with the library of this process, by kind; empty where there was none."""
    return _read(_file(library_key()))


def _read(file: Path) -> dict[str, Verdict]:
    """Return the verdicts of a file; what cannot be read is as if it were not there, for a probe writes it anew."""
    try:
        document = json.loads(file.read_text())
        if document["format"] != FORMAT:
            return {}
        return {
            kind: Verdict(bool(yes), str(reason)) for kind, (yes, reason) in document["kinds"].items() if kind in KINDS
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(key: str, kind: str, verdict: Verdict) -> None:
    """Write a verdict beside those of the other kinds, whole or not at all."""
    file = _file(key)
    kinds = {**_read(file), kind: verdict}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(json.dumps({"format": FORMAT, "kinds": kinds}, indent=1) + "\n")
    beside.replace(file)


def job_command(kind: str) -> list[str]:
    """Return the command that starts the job for one kind of communication.

    Raises
    ------
    ProbeError
        If there is no launcher.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec") or shutil.which("mpirun")
    launcher = launcher or shutil.which("srun")
    if launcher is None:
        raise ProbeError(f"no mpiexec beside {sys.executable}, and no mpiexec, mpirun or srun on PATH, to start a job")
    return [launcher, "-n", str(RANKS), sys.executable, "-m", "mpiddp.algorithms.gpu.probe", kind]


def run(command: Callable[[str], Sequence[str]] = job_command, limit_s: float = LIMIT_S) -> dict[str, Verdict]:
    """Try every kind in a job of its own, remember what became of it, and return it by kind.

    Parameters
    ----------
    command : callable
        Gives the command of the job for a kind.
    limit_s : float
        Seconds after which a job is ended, and has failed.

    Raises
    ------
    ProbeError
        If a job did not come as far as trying: no launcher, no MPI, no GPU. Nothing is remembered of it.
    """
    found = {}
    for kind in KINDS:
        key, found[kind] = _try(command(kind), limit_s)
        _remember(key, kind, found[kind])
    return found


def _try(command: Sequence[str], limit_s: float) -> tuple[str, Verdict]:
    """Run a job to its end, whatever that is; return the library's key and the verdict."""
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
    key, last = said.get("library"), (complaint.strip().splitlines() or ["it said nothing"])[-1]
    if key is None or "tries" not in said:
        why = said.get("fault") or f"it ended with exit code {job.returncode}: {last}"
        raise ProbeError(f"the job that tries device pointers could not do it: {why} ({' '.join(command)})")
    nodes = "one node" if said.get("nodes") == 1 else f"{said.get('nodes')} nodes"
    when = f"{RANKS} ranks on {nodes}, {time.strftime('%Y-%m-%d')}"
    if timed_out:
        return key, Verdict(False, f"a probe did not end in {limit_s:g} s ({when})")
    if "wrong" in said:
        return key, Verdict(False, f"a probe got wrong values: {said['wrong']} ({when})")
    if job.returncode or "right" not in said:
        return key, Verdict(False, f"a probe {_end_of(job.returncode)}: {last} ({when})")
    return key, Verdict(True, f"a probe tried it ({when}, {time.monotonic() - began:.0f} s)")


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    """End a job and all that it has started, and return what it has said."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.communicate(timeout=5)
    return "", ""


def _end_of(code: int) -> str:
    """Return how a process ended, in words: launchers give 128 more than the signal that killed a rank."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _said(output: str) -> dict[str, Any]:
    """Return what rank 0 of a job has said, a JSON object a line, as one dict."""
    said: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                said |= document
    return said

"""The sections, and how each is run: in a job of its own under a time limit, so that one that ends badly ends alone.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "harness" / "fake_gpu"


class Section(NamedTuple):
    """What is run."""

    ranks: int | None
    """On how many ranks; None: on each number that was asked for."""
    limit_s: float
    """How long it may take."""
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


SECTIONS = {
    "machine": Section(1, 60),
    "probe": Section(1, 120),
    "correctness": Section(None, 100),
    "order": Section(2, 60),
    "rates": Section(2, 60),
    "ipc": Section(None, 60),
    "staged": Section(None, 60, {"MPIDDP_ALGORITHM": "all_reduce:staged_ring"}),
    "gloo": Section(None, 90),
    "dlpack": Section(2, 60),
    "nccl": Section(1, 60),
    "step": Section(1, 90),
    "ddp": Section(None, 90),
    "train": Section(2, 90),
}
"""By name, in the order in which they run."""


def environment(fake: bool, extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of a job."""
    made = {**os.environ, **extra}
    search = [str(FAKE)] * fake + [str(ROOT), made.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    for name, value in (
        # Open MPI refuses root, and more ranks than cores.
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", "slot:oversubscribe"),
        ("PRTE_MCA_hwloc_default_binding_policy", "none"),
        ("OMP_NUM_THREADS", "2"),
        ("MPIDDP_TIMEOUT", "60"),
        ("MPIDDP_TUNED", "0"),
    ):
        made.setdefault(name, value)
    return made


def mpiexec() -> str | None:
    """Return the launcher."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def run(section: Section, name: str, ranks: int, *, fake: bool, small: bool, limit_s: float) -> list[dict]:
    """Run a section and return its rows, and one more if it did not end well."""
    launcher = mpiexec()
    alone = name in ("probe", "train")  # they start their jobs themselves
    if launcher is None:
        return [{"section": name, "ranks": ranks, "what": "no mpiexec", "wrong": True}]
    job = [sys.executable, "-m", "tests.gpu.job", name, *(["--small"] if small else [])]
    command = job if alone else [launcher, "-n", str(ranks), *job]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(fake, section.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line[5:]) for line in output if line.startswith("ROW: ")]
        if code == 0 and not rows:
            rows.append({"what": "it said nothing", "wrong": True})
        if code != 0:
            lines = [text.strip() for text in errors.read().splitlines() if text.strip()]
            # The launcher may have the last word, and says less than the rank.
            said = [*[line for line in lines[:-3] if "Error: " in line][:1], *lines[-3:]]
            how = f"not done in {limit_s:.0f} s" if code is None else f"exit code {code}"
            rows.append({"what": f"{how}: {' / '.join(said)[:1500]}", "wrong": True})
    return [{"section": name, "ranks": ranks, **row} for row in rows]


def _end(process: subprocess.Popen) -> None:
    """Leave nothing of a job behind."""
    for number, patience_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
        if process.poll() is not None and number == signal.SIGTERM:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)

"""The sections, each run in a job of its own under a time limit, so that one that ends badly ends alone.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "harness" / "fake_gpu"


class Section(NamedTuple):
    ranks: int | None
    """None: each number that was asked for."""
    limit_s: float
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


BUDGET_S = 560
"""Of all sections; their limits, on two numbers of ranks, are no more together."""

SECTIONS = {
    "machine": Section(1, 30),
    "probe": Section(1, 30),
    "staged": Section(None, 30),
    "pointers": Section(None, 25),
    "nccl": Section(None, 25),
    "gloo": Section(None, 30),
    "step": Section(1, 25),
    "ddp": Section(None, 30),
    "correctness": Section(None, 35),
    "nodes": Section(4, 20, {"MPIDDP_NODES": "0,0,1,1"}),
    "order": Section(2, 20),
    "train": Section(2, 30),
    "dlpack": Section(2, 20),
}
"""In the order in which they run: "pointers" believes what "probe" has found; figures check their values, too."""


PROBE_LIMIT_S = 12
"""For each of the two jobs of the section "probe"."""


def environment(fake: bool, extra: dict[str, str]) -> dict[str, str]:
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
        ("MPIDDP_TIMEOUT", "15"),  # less than any section has: who waits for whom is worth a row
    ):
        made.setdefault(name, value)
    return made


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def run(section: Section, name: str, ranks: int, *, fake: bool, small: bool, limit_s: float) -> Iterator[dict]:
    """Run a section and give each of its rows as soon as it is said, and one more if it does not end well."""
    launcher = mpiexec()
    alone = name in ("probe", "train")  # they start their jobs themselves
    about = {"section": name, "ranks": ranks}
    if launcher is None:
        yield {**about, "what": "no mpiexec", "wrong": True}
        return
    job = [sys.executable, "-m", "tests.gpu.job", name, *(["--small"] if small else [])]
    command = job if alone else [launcher, "-n", str(ranks), *job]
    deadline, count = time.monotonic() + limit_s, 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(fake, section.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            for line in _lines(process, deadline):
                if line.startswith("ROW: "):
                    count += 1
                    yield {**about, **json.loads(line[5:])}
            code: int | None = process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        if code == 0 and not count:
            yield {**about, "what": "it said nothing", "wrong": True}
        if code != 0:
            errors.seek(0)
            lines = [text.strip() for text in errors.read().splitlines() if text.strip()]
            # The launcher may have the last word, and says less than the rank.
            said = [*[line for line in lines[:-3] if "Error: " in line][:1], *lines[-3:]]
            how = f"not done in {limit_s:.0f} s" if code is None else f"exit code {code}"
            yield {**about, "what": f"{how}: {' / '.join(said)[:1500]}", "wrong": True}


def _lines(process: subprocess.Popen, deadline: float) -> Iterator[str]:
    """Give each line when it is written, until the process has closed its output or time is over."""
    output, text = process.stdout.fileno(), b""
    while select.select([output], [], [], max(deadline - time.monotonic(), 0))[0]:
        read = os.read(output, 1 << 16)
        if not read:
            return
        *lines, text = (text + read).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """Leave nothing of a job behind."""
    process.stdout.close()
    for number, patience_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
        if process.poll() is not None and number == signal.SIGTERM:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)

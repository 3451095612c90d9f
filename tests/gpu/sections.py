"""The sections, each run in a job of its own under a time limit, so that one that ends badly ends alone.

Imports the standard library only.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness import launcher

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "harness" / "fake_gpu"


class Section(NamedTuple):
    module: str
    """With a function of the section's name."""
    ranks: int | None
    """None: each number that was asked for."""
    limit_s: float
    is_test: bool = True
    """It is right or wrong."""
    alone: bool = False
    """It starts its job itself."""
    group: bool = True
    """Its job has a default group, with the backend "mpi", before the section begins."""
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


BUDGET_S = 560
"""Of all sections; their limits, on two numbers of ranks, are no more together."""

SECTIONS = {
    "machine": Section("machine", 1, 30, is_test=False),
    "probe": Section("machine", 1, 30, alone=True),
    "staged": Section("speed", None, 35),
    "pointers": Section("speed", None, 25),
    "nccl": Section("speed", None, 25, group=False),
    "gloo": Section("beside_torch", None, 30, is_test=False),
    "step": Section("training", 1, 25, is_test=False),
    "ddp": Section("training", None, 30, is_test=False),
    "correctness": Section("correctness", None, 50),
    "nodes": Section("correctness", 4, 20, environment={"MPIDDP_NODES": "0,0,1,1"}),
    "order": Section("correctness", 2, 20),
    "train": Section("training", 2, 30, alone=True),
    "dlpack": Section("beside_torch", 2, 20),
    "backend": Section("beside_torch", 2, 60, group=False),
}
"""In the order in which they run: "pointers" believes what "probe" has found; figures check their values, too."""


PROBE_LIMIT_S = 12
"""For each of the two jobs of the section "probe"."""


def environment() -> dict[str, str | None]:
    """Return the variables of a job: the user's, or ours; those that keep MPI from a GPU's transports only if set."""
    ours = {"OMP_NUM_THREADS": "2", "MPIDDP_TIMEOUT": "15"}  # less than any section has: who waits for whom is a row
    of_mpi = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mpi_yield_when_idle")
    return {name: os.environ.get(name, ours.get(name)) for name in (*ours, *of_mpi)}


def run(section: Section, name: str, ranks: int, *, fake: bool, small: bool, limit_s: float) -> Iterator[dict]:
    """Run a section and give each of its rows as soon as it is said, and one more if it does not end well."""
    about = {"section": name, "ranks": ranks}
    if launcher.mpiexec() is None:
        yield {**about, "what": "no mpiexec", "wrong": True}
        return
    how = {"search": [*[FAKE] * fake, ROOT], "cwd": ROOT, **environment(), **section.environment}
    if not section.alone:
        how["ranks"] = ranks
    with launcher.start("-m", "tests.gpu.job", name, *["--small"] * small, **how) as job:
        end, count, ended = time.monotonic() + limit_s, 0, False
        while not ended:
            ended = job.poll() is not None or time.monotonic() > end
            lines = job.output[0].splitlines(keepends=True)
            rows = [line[5:] for line in lines if line.startswith("ROW: ") and line.endswith("\n")]
            yield from ({**about, **json.loads(row)} for row in rows[count:])
            count = len(rows)
            time.sleep(0 if ended else 0.05)
        done = job.wait(0)
    if done.rc == 0 and not count:
        yield {**about, "what": "it said nothing", "wrong": True}
    if done.rc != 0:
        late = done.rc == launcher.TIMED_OUT
        lines = [text.strip() for text in done.stderr.splitlines()[: -1 if late else None] if text.strip()]
        # The launcher may have the last word, and says less than the rank.
        said = [*[line for line in lines[:-3] if "Error: " in line][:1], *lines[-3:]]
        how_it_ended = f"not done in {limit_s:.0f} s" if late else f"exit code {done.rc}"
        yield {**about, "what": f"{how_it_ended}: {' / '.join(said)[:1500]}", "wrong": True}

"""Prints how fast a training goes on when a rank is killed: ``python -m tests.measure.recovery``.

A row is a way to go on, a number of ranks and of hosts (network namespaces on this machine, see hosts). A random rank
is killed at a random moment, as often as ``--kills`` says: seconds from SIGKILL to the end of the next step that is
made after the recovery, and completed steps that are made again. A kill is lost if no further step follows.

survivors   ``mpiddp.elastic.run``: the others go on (Open MPI's mpirun --with-ft ulfm)
spares      the same with two spare ranks
restart     ``python -m mpiddp run``: the job starts again from its last checkpoint, written every 10 steps
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import hosts
from harness.launcher import ULFM, Program, start

WAYS = ("survivors", "spares", "restart")
SPARES = 2
_KILLS_OF_A_JOB = {"survivors": 1, "spares": SPARES, "restart": 5}
_LIMIT_S = 90.0
"""Until a job begins or goes on."""


@dataclass
class Row:
    """Recoveries of one way."""

    seconds: list[float] = field(default_factory=list)
    """From SIGKILL to the end of the next step."""
    repeated: list[int] = field(default_factory=list)
    """Completed steps that were made again."""
    lost: list[str] = field(default_factory=list)
    """Ends of the jobs that did not go on."""

    @property
    def kills(self) -> int:
        return len(self.seconds) + len(self.lost)


def measure(way: str, ranks: int, host_count: int, kills: int, rng: np.random.Generator) -> Row:
    """Kill ranks of jobs until there are enough kills."""
    row = Row()
    while row.kills < kills:
        of_job = min(_KILLS_OF_A_JOB[way], kills - row.kills)
        with tempfile.TemporaryDirectory(prefix="mpiddp-recovery-") as name:
            folder = Path(name)
            with _job(way, ranks, host_count, folder) as job:
                before, size = 0.0, ranks
                for _ in range(of_job):
                    # Some steps after the last recovery, at any moment of a step, a checkpoint included.
                    if not _next(job, folder, before, steps=5):
                        raise RuntimeError(f"{way}, {ranks} ranks: no steps\n" + "\n".join(job.output))
                    time.sleep(rng.uniform(0, 0.2))
                    pid = int((folder / f"rank-{rng.integers(size)}").read_text())
                    killed_s = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    found = _next(job, folder, killed_s, steps=3)
                    if not found:
                        row.lost.append("\n".join(job.output))
                        break
                    first_s, number = found
                    row.seconds.append(first_s - killed_s)
                    done = max(n for _, n, made in _steps(folder) if made < killed_s)
                    row.repeated.append(max(0, done + 1 - number))
                    before = killed_s
    return row


@contextlib.contextmanager
def _job(way: str, ranks: int, host_count: int, folder: Path) -> Iterator[Program]:
    spares = SPARES if way == "spares" else 0
    how: dict[str, Any] = {"ranks": ranks + spares, "options": ULFM}
    if way == "restart":
        # The marker is made in the working directory.
        supervisor = ["env", "-C", folder, sys.executable, "-m", "mpiddp", "run", "--restarts", "99", "--"]
        how |= {"options": (), "before": supervisor}
    with contextlib.ExitStack() as stack:
        if host_count > 1:
            how["on"] = stack.enter_context(hosts.Hosts(host_count)).block
        yield stack.enter_context(start("recovery", folder, way, spares, **how))


def _steps(folder: Path) -> list[tuple[float, int, float]]:
    """Return the completed steps: time, number, time at which their state was made."""
    file = folder / "steps"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(time_s), int(number), float(made_s)) for time_s, number, made_s in words]


def _next(job: Program, folder: Path, after_s: float, steps: int) -> tuple[float, int] | None:
    """Return time and number of the first step of a state made later, once there are some; None if none come."""
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end and job.poll() is None:
        found = [(time_s, number) for time_s, number, made_s in _steps(folder) if made_s > after_s]
        if len(found) >= steps:
            return found[0]
        time.sleep(0.02)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)} (all that this MPI can)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (2 4 8)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2], help="numbers of hosts (1 2)")
    parser.add_argument("--kills", type=int, default=50, help="of a row (50)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (0)")
    given = parser.parse_args()
    library = hosts.mpi_library()
    possible = WAYS if "Open MPI" in library else ("restart",)
    ways = given.ways or possible
    if not set(ways) <= set(possible):
        parser.error(f"{library} can {', '.join(possible)}, got {', '.join(ways)}")
    fault = hosts.why_not()
    if fault and max(given.hosts) > 1:
        sys.exit(fault)
    # The ranks are in sessions of their own: what ends this process, as `timeout` does, reaches them through it alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{library}, seed {given.seed}, load {os.getloadavg()[0]:.1f}\n", flush=True)
    print("| way | ranks | hosts | kills | lost | s, median | s, worst | steps again, median | worst |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for host_count in given.hosts:
        for way in ways:
            for ranks in given.ranks:
                row = measure(way, ranks, host_count, given.kills, np.random.default_rng([given.seed, ranks]))
                cells = [way, ranks, host_count, row.kills, len(row.lost)]
                if row.seconds:
                    cells += [f"{statistics.median(row.seconds):.2f}", f"{max(row.seconds):.2f}"]
                    cells += [f"{statistics.median(row.repeated):g}", max(row.repeated)]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
                for each in row.lost:
                    print(each, file=sys.stderr, flush=True)
                failed = failed or bool(row.lost)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

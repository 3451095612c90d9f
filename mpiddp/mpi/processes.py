"""The processes that Open MPI's mpirun has started on this host, and those that die before MPI runs.

Under ``--with-ft ulfm`` the others would wait in MPI_Init for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mpiddp import settings

from . import stdio

_STARTERS = ("mpirun", "mpiexec", "prterun", "orterun", "prted", "orted")
_LOOK_S = 0.25
_MISSING_S = 2.0
"""mpirun starts one after the other."""
_END_S = 3.0
"""For mpirun to end this process."""


def started_ranks(starter: int) -> set[str]:
    """Return the running ranks, without daemons, that a launcher or its daemon has started."""
    return {pid for pid in _children(starter) if runs(pid) and _is_rank(pid)}


def _children(pid: int) -> set[str]:
    found = set[str]()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found |= set((thread / "children").read_text().split())
    return found


def _is_rank(pid: str) -> bool:
    try:
        return b"\0OMPI_COMM_WORLD_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def runs(pid: str | int) -> bool:
    """Return False for zombies."""
    return state(pid) not in "ZX"


def state(pid: str | int) -> str:
    """Return a process's state as the kernel's letter, "X" where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@contextlib.contextmanager
def watch_start() -> Iterator[None]:
    """End the job if a rank of this host dies during the block, where mpirun lets the others live."""
    over = threading.Event()
    expected = settings.local_ranks() or 0 if settings.launcher_survives() else 0
    if expected > 1 and name(os.getppid()) in _STARTERS:
        threading.Thread(target=_watch, args=(expected, over), name="mpiddp-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def name(pid: int) -> str:
    """Return a process's command; "" where it has ended or is not to be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _watch(expected: int, over: threading.Event) -> None:
    starter = os.getppid()
    since = time.monotonic()
    while not over.wait(_LOOK_S):
        running = list(map(int, started_ranks(starter)))
        if not running or len(running) >= expected:
            since = time.monotonic()
        elif time.monotonic() - since > _MISSING_S:
            if os.getpid() == min(running):
                dead = expected - len(running)
                sys.stderr.write(
                    f"{dead} of the {expected} ranks on this host ended before MPI had started, which the others wait"
                    " for in MPI_Init: the job ends; start it again\n"
                )
                stdio.deliver()
                os.kill(starter, signal.SIGTERM)
                time.sleep(_END_S)
            else:
                time.sleep(2 * _END_S)
            os._exit(1)

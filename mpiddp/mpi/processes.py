"""The processes that an mpirun has started on this host, and those that end before MPI runs.

The others would wait for them in MPI_Init for ever: neither Hydra nor Open MPI minds a rank that exits before.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mpiddp import settings

from . import stdio

_HYDRA = "hydra_pmi_proxy"
_STARTERS = ("mpirun", "mpiexec", "prterun", "orterun", "prted", "orted", _HYDRA)
_RANK = re.compile(rb"\0(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)\0")
_UNKNOWN = -1
"""Of a process that has written its title over its environment, as setproctitle does."""
_LOOK_S, _LOOK_RANK_S = 0.25, 0.01
"""Each rank of a host looks at all of them: many look less often."""
_MISSING_S = 2.0
"""Launchers start one rank after the other."""
_END_S = 3.0
"""For mpirun to end this process."""


def started_ranks(starter: int) -> dict[str, int]:
    """Return the running ranks, without daemons, that a launcher or its daemon has started, by process."""
    found = {pid: _rank(pid) for pid in _children(starter) if runs(pid)}
    return {pid: rank for pid, rank in found.items() if rank is not None}


def _children(pid: int) -> set[str]:
    found = set[str]()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found |= set((thread / "children").read_text().split())
    return found


def _rank(pid: str) -> int | None:
    with contextlib.suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        announced = _RANK.search(b"\0" + environment)
        if announced is not None:
            return int(announced[1])
        return None if b"=" in environment else _UNKNOWN
    return None


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
    """End the job if a rank of this host ends during the block, or has ended before."""
    over = threading.Event()
    expected = settings.local_ranks() or 0
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
    starter, before, since = os.getppid(), dict[str, int](), time.monotonic()
    look_s = max(_LOOK_S, _LOOK_RANK_S * expected)
    while not over.wait(look_s):
        ranks = started_ranks(starter)
        if ranks != before or not ranks or len(ranks) >= expected:
            before, since = ranks, time.monotonic()
        elif time.monotonic() - since > _MISSING_S:
            if os.getpid() == min(map(int, ranks)):
                sys.stderr.write(
                    f"{_missing([*ranks.values()], expected)} ended before MPI had started, and the others wait in"
                    " MPI_Init: the job ends; every rank has to call init_process_group, so look for an error, an exit"
                    " or a return before it\n"
                )
                stdio.deliver()
                time.sleep(2 * look_s)  # let the others see the same, and be silent
                if settings.launcher_survives():
                    os.kill(starter, signal.SIGTERM)
                    time.sleep(_END_S)
                elif name(starter) == _HYDRA:
                    os.kill(os.getpid(), signal.SIGKILL)  # Hydra does not mind exits before MPI has started
            else:
                time.sleep(2 * _END_S)
            os._exit(1)


def _missing(running: list[int], expected: int) -> str:
    launch = settings.launch()
    if launch is None or launch.size != expected or _UNKNOWN in running:  # or on other hosts there are more
        return f"{expected - len(running)} of the {expected} ranks on host {socket.gethostname()}"
    ended = sorted(set(range(expected)).difference(running))
    return f"rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))} of {expected}"
